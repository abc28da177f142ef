"""Operations that multiply in float64: their checks are the real ones, their kernels are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops import reference

from deepgemm_jit import ops
from deepgemm_jit.ops import checks

BF16 = torch.bfloat16


class Products:
    """In place of the GEMM operations: their checks, and then the product in float64, on any device.

    Attributes:
        called: names of the operations, in order.
        options: what each was given by keyword.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        self.options: list[dict[str, Any]] = []
        for name in ops.__all__:
            if "_gemm_" in name:
                monkeypatch.setattr(ops, name, self._double(name))

    def _double(self, name: str) -> Callable[..., None]:
        fp8, n_major = "fp8" in name, "_nn" in name
        masked, contiguous = name.endswith("masked"), name.endswith("contiguous")

        def run(a: Any, b: Any, out: torch.Tensor, groups: Any = None, expected_m: Any = None, **options: Any) -> None:
            self.called.append(name)
            self.options.append(options | ({"expected_m": expected_m} if masked else {}))
            scales = (a[1], b[1]) if fp8 else None
            a, b = (a[0], b[0]) if fp8 else (a, b)
            psum = options.get("use_psum_layout", False)
            group_data = None
            if groups is not None:
                group_data = checks.GroupData("masked_m" if masked else "m_indices", groups, per_row=contiguous and not psum)
            alignment = options.get("alignment", 128)
            checks.check_gemm(name, a, b, out, scales, group_data, masked=masked, n_major=n_major, alignment=alignment, fake=True)
            if n_major:
                b, scales = b.mT, None if scales is None else (scales[0], scales[1].mT)
            if fp8:
                a, b = wide(a, scales[0], 1), wide(b, scales[1], 128)
            if groups is None:
                out.copy_(a.double() @ b.double().T)
                return
            for group in range(b.shape[0]):
                if masked:
                    rows: Any = slice(0, int(groups[group]))
                    out[group, rows] = (a[group, rows].double() @ b[group].double().T).to(BF16)
                    continue
                start = 0 if group == 0 or not psum else checks.round_up(int(groups[group - 1]), alignment)
                rows = slice(start, int(groups[group])) if psum else groups == group
                out[rows] = (a[rows].double() @ b[group].double().T).to(BF16)

        return run


def wide(values: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Return (..., rows, K) FP8 values times scales per ``rows`` rows and 128 columns, in float64."""
    if values.dim() == 3:
        return torch.stack([wide(one, scale, rows) for one, scale in zip(values, scales, strict=True)])
    return reference.dequantize(values, scales, rows)
