"""What records say of how they were made; imports nothing, so that the parent starts at once."""

from __future__ import annotations

LOOP = (
    "outputs = model(**batch); outputs.loss.backward(); optimizer.step(); "
    "optimizer.zero_grad(set_to_none=True); outputs is held; batches stand on the device and have "
    "input_ids and labels; AdamW, fused; no deterministic kernels"
)

TRAINER_LOOP = (
    "transformers.Trainer with bf16 autocast, its default clipping and schedule, AdamW fused, over "
    "tokenised records in seeded order; a batch is padded to its longest record, or further to a "
    "multiple; labels leave the prompt out; no logging, no deterministic kernels"
)

TIME_METHOD = (
    "step_seconds: on CUDA the time between events on the compute stream after each step, without "
    "a wait in between, as the loop has none; on a CPU the host's clock."
)

MEMORY_METHOD = (
    "peak_allocated_bytes and peak_reserved_bytes: the allocator's peaks from the first warm-up "
    "step on. peak_device_bytes: memory in use on the whole GPU, context and graphs included, the "
    "highest of total less free (cudaMemGetInfo) after every step and of the driver's own count "
    "(NVML, where it is there), sampled every 10 ms while building and in every step that is not "
    "timed; nobody else used the GPU. peak_device_bound_bytes: the allocator's peak of reserved "
    "memory and what was in use beside it at the end, which the peak cannot exceed. "
    "device_bytes_before: the driver's count as the process found it."
)

LINK_METHOD = (
    "link_bytes_per_second: host to device from page-locked memory as Poros' host store has it, "
    "the median of 15 copies between CUDA events, at 256 MiB and at the size of one unit, measured "
    "after the steps in every process of the run; the highest of all counts."
)

WEIGHTS = (
    "seeded random, drawn as stored (NF4: random packed bytes and absmax, blocks of 64, no double "
    "quantisation; all else bf16), no checkpoint"
)

WEIGHTS_CHECKPOINT = "seeded random, from a bf16 checkpoint"

WEIGHTS_ROLLED = (
    "from a checkpoint that is quantised already: seeded random layers, quantised as they are "
    "loaded, and all further layers copies of them with their bytes rolled"
)

PROCESS = (
    "measured_before_in_process counts measurements that the same process made before this one, "
    "with the same base: their adapters, graphs and window were dropped, adapters drawn anew and "
    "peaks restarted; allocated_before_bytes is what the allocator held then. Kernels that they "
    "loaded stay in peak_device_bytes."
)
