from poros_core.conformance import check_family


def test_conformance() -> None:
    check_family("qwen2", precision="int8", block_sizes=(1, 2))
