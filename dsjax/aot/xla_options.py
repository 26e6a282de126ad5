"""XLA compiler options, in one table."""

CompilerOptions = dict[str, bool | int | str]

ALWAYS: CompilerOptions = {
    # XLA may otherwise skip the rounding to bf16 between operations that it fuses, so that plans would differ.
    "xla_allow_excess_precision": False,
    # XLA for GPUs would otherwise join the weights of products that share an input in every step, a copy of them all.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # What a CUDA graph may hold: all that XLA can put there but collectives. By default loops are left out; each of
    # their rounds, and each condition around one, then waits for the device.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
}

# Deterministic mode. Only GPUs heed these.
DETERMINISTIC: CompilerOptions = {
    # Scatters whose indices may repeat add in the order of their indices.
    "xla_gpu_exclude_nondeterministic_ops": True,
    # Timing candidates may choose another algorithm for a product in each process and each executable.
    "xla_gpu_autotune_level": 0,
    # Fused products need that timing to be fast; cuBLAS does not.
    "xla_gpu_enable_triton_gemm": False,
}


def compiler_options(deterministic: bool) -> CompilerOptions:
    """The options of every executable."""
    return ALWAYS | DETERMINISTIC if deterministic else ALWAYS
