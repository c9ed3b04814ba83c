import pytest

from poros_core.conformance import check_family


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_conformance(family: str) -> None:
    check_family(family)
