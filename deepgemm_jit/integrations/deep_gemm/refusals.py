"""What an argument of DeepGEMM's may say here; all else is refused before anything is launched."""

from __future__ import annotations

from typing import Any

import torch

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.ops.checks import SCALE_BLOCK, whole_number

_RECIPE = (1, SCALE_BLOCK, SCALE_BLOCK)
"""Rows of A, rows of B and columns that share a scale."""
_RECIPE_A, _RECIPE_B = (1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK)


def require_scales_we_read(operation: str, a: Any, b: Any, recipe: Any, recipe_a: Any, recipe_b: Any) -> None:
    """Refuse FP4 values, packed scales and scales of other blocks than 1 x 128 of A and 128 x 128 of B.

    Raises:
        OperandError: a recipe that is no sequence of numbers.
        UnsupportedError: what was given, and what serves instead.
    """
    # Each call of a decoding step comes through here: what is as usual is passed with a comparison or two.
    if recipe is not None or recipe_a is not None or recipe_b is not None:
        _require_recipe(operation, "recipe", recipe, _RECIPE)
        _require_recipe(operation, "recipe_a", recipe_a, _RECIPE_A)
        _require_recipe(operation, "recipe_b", recipe_b, _RECIPE_B)
    _require_operand(operation, "a", a)
    _require_operand(operation, "b", b)


def numbers(operation: str, name: str, given: Any) -> tuple[int, ...]:
    """Return a tuple or a list of whole numbers as a tuple.

    Raises:
        OperandError: it is something else.
    """
    if not isinstance(given, (tuple, list)):
        raise OperandError(operation=operation, faults=[f"{name} must be a tuple of whole numbers, not {given!r}"])
    return tuple(whole_number(operation, f"each number of {name}", number) for number in given)


def _require_recipe(operation: str, name: str, given: Any, ours: tuple[int, ...]) -> None:
    if given is not None and (recipe := numbers(operation, name, given)) != ours:
        raise UnsupportedError(
            given=f"{operation} with {name}={recipe}",
            supported=f"{name}={ours}, or None",
            advice="Weights with a scale per row and 128 columns are served in the experts forward, by ops.prepare_experts",
        )


def _require_operand(operation: str, name: str, operand: Any) -> None:
    values, scales = operand if isinstance(operand, (tuple, list)) and len(operand) == 2 else (operand, None)
    if getattr(values, "dtype", None) is torch.int8:
        raise UnsupportedError(
            given=f"{operation} with FP4 values in {name} (packed in int8)",
            supported="float8_e4m3fn",
            advice="A Hopper GPU has no FP4 products; ops.prepare_experts folds FP4 experts into FP8 exactly",
        )
    if getattr(scales, "dtype", None) is torch.int32:
        raise UnsupportedError(
            given=f"{operation} with scales of {name} packed as UE8M0 in int32",
            supported="float32 scales",
            advice="Only Blackwell's kernels read packed ones; give the float32 scales they were made of",
        )


def require_plain_output(operation: str, d: Any, c: Any = None) -> None:
    """Refuse what is to be accumulated onto, and an output in float32.

    Raises:
        UnsupportedError: what was given, and what serves instead.
    """
    if c is not None:
        raise UnsupportedError(
            given=f"{operation} with c, to be added to the product",
            supported="c=None",
            advice="Our kernels only write D; add c afterwards with d.add_(c)",
        )
    if getattr(d, "dtype", None) is torch.float32:
        raise UnsupportedError(
            given=f"{operation} with an output of torch.float32",
            supported="torch.bfloat16; sums are float32 inside",
            advice="Let it write a bfloat16 tensor and widen that",
        )
