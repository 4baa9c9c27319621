"""Program -> compiled program: for this machine's device or for another GPU, with its memory and its kernels.

In: jitted functions. Out: peaks, kernels, live ranges, seconds. Invariant: all figures come from the text of the
compiled module; nothing in this room plans.

Reading order: `_program` (variants of the user's step), `_target` and `_target_worker` (other GPUs), `_devices`,
`_memory_stats`; `_hlo` (text -> instructions), `_liveness`, `_peak_contents`, `_roofline`, `_overwritten_reads` (a
defect of XLA that plans must avoid), `_compiled_step` (all of these, each read once); `_tags` (the equation of each
kernel), `_scratch`; `_single_equation` and `_measured_times` (single equations, compiled or timed separately).
"""
