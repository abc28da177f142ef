"""Names of DeepGEMM that are not served, each with the reason: they can be imported and looked for, and refuse to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from deepgemm_jit.errors import UnsupportedError

_TRAINING = "it sums over K per group, for gradients of weights; the kernels here are for inference"
_ATTENTION = "it scores tokens for sparse attention; the kernels here are GEMMs of linear and experts layers"
_CUBLAS = "it calls cuBLASLt; torch.mm(a, b.T, out=d) does so too"
_EINSUM = "there is no kernel for batched products of heads; torch.einsum runs them"
_MEGA = "it joins experts and communication of several GPUs in one kernel; ops.fp8_experts runs the experts of one GPU"
_PACKED = "it makes scales packed as UE8M0, which only Blackwell's kernels read; keep the float32 scales"
_FP4 = "a Hopper GPU has no FP4 products; ops.prepare_experts folds FP4 experts into FP8 exactly"
_ROUNDS = "a scale that is rounded alone changes what its values mean; ops.requantize_ue8m0 makes both anew"
_HYPER = "there is no TF32 kernel; torch.mm and torch.sum run it"
_BENCH = "it is a helper of DeepGEMM's tests and benchmarks; bench/ of this repository has its own"
_GROUP = "it is a helper of DeepGEMM's tests; torch.distributed has init_process_group and all_gather"
_TRITON = (
    "it is a Triton kernel for GPUs before Hopper, with a gather or for gradients; torch._grouped_mm runs grouped products there"
)

REASONS: Mapping[str, str] = {
    "SM90SymmBuffer": _MEGA,
    "SymmBuffer": _MEGA,
    "bf16_mega_moe": _MEGA,
    "cast_back_from_fp4": _FP4,
    "ceil_to_ue8m0": _ROUNDS,
    "cublaslt_gemm_nn": _CUBLAS,
    "cublaslt_gemm_nt": _CUBLAS,
    "cublaslt_gemm_tn": _CUBLAS,
    "cublaslt_gemm_tt": _CUBLAS,
    "einsum": _EINSUM,
    "fp8_einsum": _EINSUM,
    "fp8_fp4_mega_moe": _MEGA,
    "fp8_fp4_mqa_logits": _ATTENTION,
    "fp8_fp4_paged_mqa_logits": _ATTENTION,
    "fp8_gemm_nt_skip_head_mid": "there is no kernel that leaves out the middle of each head; multiply and slice the result",
    "fp8_mega_moe": _MEGA,
    "fp8_mqa_logits": _ATTENTION,
    "fp8_paged_mqa_logits": _ATTENTION,
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": _PACKED,
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": _PACKED,
    "get_paged_mqa_logits_metadata": _ATTENTION,
    "get_symm_buffer_for_mega_moe": _MEGA,
    "get_symm_buffer_for_sm90_mega_moe": _MEGA,
    "init_dist": _GROUP,
    "k_grouped_bf16_gemm_tn_contiguous": _TRAINING,
    "k_grouped_fp8_gemm_nt_contiguous": _TRAINING,
    "k_grouped_fp8_gemm_tn_contiguous": _TRAINING,
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": _TRAINING,
    "mega_moe_pre_dispatch": _MEGA,
    "pack_ue8m0_to_int": _PACKED,
    "per_channel_cast_to_fp8": "scales per 128 rows and column are read by GEMMs that sum over K per group, which are not here",
    "per_token_cast_to_fp4": _FP4,
    "tf32_hc_prenorm_gemm": _HYPER,
    "transform_weights_for_mega_moe": _MEGA,
    "transform_weights_for_mega_moe_sm90": _MEGA,
    "transpose_packed_fp4": _FP4,
    "uneven_all_gather": _GROUP,
    "unpack_ue8m0_from_int": _PACKED,
    "wgrad_gemm_fp8_fp8_fp32_nt": _TRAINING,
    "legacy.a_fused_k_grouped_bf16_gemm_tn_contiguous_tl": _TRITON,
    "legacy.a_fused_m_grouped_bf16_gemm_nn_contiguous_tl": _TRITON,
    "legacy.a_fused_m_grouped_bf16_gemm_nt_contiguous_tl": _TRITON,
    "legacy.b_fused_k_grouped_bf16_gemm_tn_contiguous_tl": _TRITON,
    "legacy.m_grouped_bf16_gemm_nn_contiguous_tl": _TRITON,
    "legacy.m_grouped_bf16_gemm_nt_contiguous_tl": _TRITON,
    "testing.assert_bitwise_equal": _BENCH,
    "testing.bench": _BENCH,
    "testing.bench_kineto": _BENCH,
    "testing.calc_diff": _BENCH,
    "testing.count_bytes": _BENCH,
    "testing.empty_suppress": _BENCH,
    "testing.get_arch_major": _BENCH,
    "testing.ignore_env": _BENCH,
    "testing.suppress_stdout_stderr": _BENCH,
    "testing.test_filter": _BENCH,
    "utils.dist.dist_print": _GROUP,
}
"""By name in the module, or in a module of it; functions of ``utils`` by their own name, as DeepGEMM has them at the top too."""


def named(module: str, name: str, within: str = "") -> Callable[..., NoReturn]:
    """Return what stands for a name that is not served: a function that says why.

    Args:
        module: that was asked for it, by its full name.
        name: as the caller spells it.
        within: the module of DeepGEMM that has it, for example ``testing``; empty for the top.

    Raises:
        AttributeError: DeepGEMM has no such name.
    """
    dotted = f"{within}.{name}" if within else name
    reason = REASONS.get(dotted)
    if reason is None:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; docs/migration.md lists the names there are", name=name
        )

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        what, _, instead = reason.partition("; ")
        raise UnsupportedError(
            given=f"deep_gemm.{dotted}: {what}", supported="the names with a yes in docs/migration.md", advice=instead
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not served: {reason}."
    return refuse
