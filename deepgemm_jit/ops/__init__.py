"""Operations on torch tensors, under the names DeepGEMM gave them. Needs torch; a call compiles lazily what is missing."""

from importlib.util import find_spec

from deepgemm_jit.errors import ToolchainError

if find_spec("torch") is None:
    raise ToolchainError(
        missing="package torch",
        looked_for="torch",
        fix="Install it with: pip install torch; all else works without",
    )

from deepgemm_jit.ops.experts import bf16_experts, fp8_experts
from deepgemm_jit.ops.gemm import (
    bf16_gemm_nn,
    bf16_gemm_nt,
    fp8_gemm_nn,
    fp8_gemm_nt,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nn_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from deepgemm_jit.ops.launching import get_num_sms, get_pdl, set_num_sms, set_pdl
from deepgemm_jit.ops.quant import get_mn_major_tma_aligned_tensor, per_token_cast_to_fp8
from deepgemm_jit.ops.ue8m0 import requantize_ue8m0, to_ue8m0
from deepgemm_jit.ops.weights import Activation, Experts, Projection, prepare_experts

__all__ = [
    "Activation",
    "Experts",
    "Projection",
    "bf16_experts",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "fp8_experts",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_pdl",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "per_token_cast_to_fp8",
    "prepare_experts",
    "requantize_ue8m0",
    "set_num_sms",
    "set_pdl",
    "to_ue8m0",
]
