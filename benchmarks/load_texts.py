"""What records of a load say of how they were made; imports nothing."""

from __future__ import annotations

LOAD_METHOD = (
    "One process loads once, after a tiny model in the same way, so that Python's imports, the "
    "CUDA context and the quantiser's first launch are made before. A virtual machine may be given "
    "memory only when it is first touched, which would slow the load and not the rates that are "
    "measured after it; so host_touched_before_bytes of memory, what the base takes and 1 GiB, are "
    "touched and given up before. seconds: poros.load from its "
    "call to its return. device_peak_bytes: the allocator's peak "
    "(torch.cuda.max_memory_allocated) in the load, over the level before it; "
    "device_driver_peak_bytes: memory in use on the whole GPU, context included, by the driver's "
    "own count, sampled every 10 ms. host_peak_bytes: RssAnon and RssShmem of /proc/self/status, "
    "sampled every 20 ms, over the level before the load. The store is private anonymous memory "
    "that is registered with cudaHostRegister, so page-locked memory is in RssAnon; what torch's "
    "own pinned allocator holds (cudaHostAlloc, in no Rss) is added. Mapped pages of files are "
    "left out: on a disk they are RssFile; on a memory disk they are RssShmem, so what "
    "/proc/self/smaps says of the folder's files, read every 250 ms, is taken off, the smaller of "
    "the readings before and after each sample. host_steady_bytes: the same after the load, once "
    "garbage is collected. packed_bytes: packed weights with all of their quantisation state; "
    "unquantised_bytes: all other parameters, those that stand on the device included."
)

FLOOR_METHOD = (
    "Each rate is measured after the load in the same process. read: pread of 16 MiB pieces by 8 "
    "threads into warm memory, over the files that the load read, from the page cache as "
    "page_cache says (from a memory disk it is the rate of a copy in memory). quantise: "
    "bitsandbytes quantize_4bit on the device, on a weight as large as the largest, median of 10. "
    "to_device and to_host: copies of 256 MiB between the device and memory as the store has it, "
    "median of 15. page_lock: allocating and registering stretches of the sizes of the store's, up "
    "to 8 GiB, with as many threads as a load (page_locking.makers), median of 3. write: writing 1 "
    "GiB to the cache's disk with fsync, once. A stage's "
    "seconds are its bytes over its rate; floor_seconds is the slowest stage's. hash, in no "
    "floor: SHA-256 by all cores, 16 at most, as a base from the cache is checked."
)

GENERATED = (
    "the matrices of layers are seeded random bf16, copied piece by piece from a pool of 1 GiB in "
    "memory where the loader would read them from their shard; all else is read from files"
)

CHECKED = (
    "Every weight is quantised once more as the standard load does it: bf16 values on the device, "
    "then Transformers' Bnb4bitQuantize on a skeleton that its Bnb4BitHfQuantizer prepared. "
    "dtype, shape and SHA-256 of packed data and every tensor of the quantisation state are "
    "compared; of what is not quantised, with the checkpoint's tensor. Buffers are left out."
)
