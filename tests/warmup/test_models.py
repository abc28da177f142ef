"""Reading a model's config: what is understood, what is named as uncovered, what is refused and how."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.warmup import read_model

pytestmark = pytest.mark.none

Varied = Callable[[dict[str, Any]], Path]


@pytest.mark.parametrize(
    ("name", "hidden", "width", "experts", "per_token"),
    [
        ("deepseek-v3", 7168, 2048, 256, 8),
        ("deepseek-v4-flash", 4096, 2048, 256, 6),
        ("qwen3-235b-a22b-fp8", 4096, 1536, 128, 8),
        ("qwen3-30b-a3b-fp8", 2048, 768, 128, 8),
    ],
)
def test_published_configs_give_the_sizes_of_their_experts(
    models: Path, name: str, hidden: int, width: int, experts: int, per_token: int
) -> None:
    model = read_model(models / name)
    assert (model.hidden_size, model.intermediate_size, model.experts, model.experts_per_token) == (
        hidden,
        width,
        experts,
        per_token,
    )


def test_a_folder_and_its_file_read_the_same(models: Path) -> None:
    assert read_model(models / "deepseek-v3") == read_model(str(models / "deepseek-v3" / "config.json"))


def test_the_mixtral_family_keeps_the_width_of_an_expert_in_intermediate_size(varied: Varied) -> None:
    changes = {"num_experts": ..., "moe_intermediate_size": ..., "num_local_experts": 8, "intermediate_size": 14336}
    model = read_model(varied(changes))
    assert (model.experts, model.experts_key) == (8, "num_local_experts")
    assert (model.intermediate_size, model.intermediate_key) == (14336, "intermediate_size")


def test_a_config_that_also_holds_a_vision_model_is_read_through_its_text_config(varied: Varied) -> None:
    text = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 64, "num_experts_per_tok": 4}
    keys = {"hidden_size": ..., "moe_intermediate_size": ..., "num_experts": ..., "num_experts_per_tok": ...}
    model = read_model(varied({**keys, "text_config": text}))
    assert (model.hidden_size, model.intermediate_size, model.experts) == (4096, 1536, 64)


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("value", [..., None, 0, -8, "768", 768.0, True, [768]], ids=repr)
def test_a_missing_or_meaningless_size_is_refused_by_its_key(varied: Varied, key: str, value: object) -> None:
    folder = varied({key: value})
    with pytest.raises(OperandError, match=key) as caught:
        read_model(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert value is ... or key not in ("hidden_size", "num_experts_per_tok") or repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "quantization_config",
        "quantization_config.quant_method",
        "quantization_config.activation_scheme",
        "quantization_config.weight_block_size",
    ],
)
def test_a_missing_quantization_key_is_refused_by_its_name(varied: Varied, key: str) -> None:
    with pytest.raises(OperandError, match=f"key {key} is missing"):
        read_model(varied({key: ...}))


def test_all_faults_of_a_config_are_named_at_once(varied: Varied) -> None:
    with pytest.raises(OperandError) as caught:
        read_model(varied({"hidden_size": ..., "num_experts_per_tok": 0, "quantization_config": ...}))
    assert len(caught.value.faults) == 3


def test_more_experts_per_token_than_experts_are_refused(varied: Varied) -> None:
    with pytest.raises(OperandError, match="num_experts_per_tok = 8 is more than num_experts = 4"):
        read_model(varied({"num_experts": 4}))


def test_two_expert_counts_that_disagree_are_refused(varied: Varied) -> None:
    with pytest.raises(OperandError, match="num_experts = 128 and n_routed_experts = 64 disagree"):
        read_model(varied({"n_routed_experts": 64}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config.quant_method", "gptq"),
        ("quantization_config.quant_method", "compressed-tensors"),
        ("quantization_config.quant_method", None),
        ("quantization_config.fmt", "e5m2"),
        ("quantization_config.activation_scheme", "per_channel"),
        ("quantization_config.weight_block_size", None),
        ("quantization_config.weight_block_size", [1, 32]),
        ("quantization_config.weight_block_size", 128),
        ("quantization_config.scale_fmt", "e8m7"),
        ("quantization_config.expert_dtype", "int4"),
        ("expert_dtype", "nf4"),
    ],
)
def test_an_unknown_quantization_is_refused_by_key_and_value_with_what_is_served(varied: Varied, key: str, value: object) -> None:
    folder = varied({key: value})
    with pytest.raises(UnsupportedError) as caught:
        read_model(folder)
    assert f"{key} = " in caught.value.given
    assert str(folder) in caught.value.given
    assert "weight_block_size [128, 128]" in caught.value.supported


def test_a_quantization_without_fmt_is_e4m3(varied: Varied) -> None:
    assert read_model(varied({"quantization_config.fmt": ...})).experts_covered


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"hidden_size": 20', b"[1, 2]", b"3", b"null", b"\xff\xfe{}", b"[" * 100_000, b"\x80\x04pickle"],
    ids=["empty", "brace", "half-written", "list", "number", "null", "not-utf8", "deep", "pickle"],
)
def test_a_file_that_is_no_json_object_is_refused_by_its_path(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(OperandError) as caught:
        read_model(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", ["missing file", "missing folder", "empty folder", "fifo"])
def test_what_cannot_be_read_is_refused_by_its_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "no-such-folder" / "config.json" if kind == "missing folder" else tmp_path / "model"
    if kind == "empty folder":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(OperandError, match="cannot be read") as caught:
        read_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expert_dtype": "fp4"}, "expert_dtype = fp4"),
        ({"quantization_config.expert_dtype": "fp4"}, "expert_dtype = fp4"),
        ({"quantization_config.activation_scheme": "static"}, "activation_scheme = static"),
        ({"quantization_config.modules_to_not_convert": ["lm_head", "mlp.experts"]}, "mlp.experts"),
    ],
)
def test_experts_without_kernels_are_uncovered_with_the_reason(varied: Varied, changes: dict[str, Any], reason: str) -> None:
    model = read_model(varied(changes))
    assert not model.experts_covered
    assert any(part.what.startswith("experts") and reason in part.reason for part in model.uncovered)


def test_one_layer_that_is_not_converted_leaves_the_experts_of_the_others(varied: Varied) -> None:
    kept = ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp.gate"]
    assert read_model(varied({"quantization_config.modules_to_not_convert": kept})).experts_covered


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("deepseek-v3", ["attention", "shared experts (n_shared_experts = 1)", "dense MLP layers (first_k_dense_replace = 3)"]),
        ("deepseek-v4-flash", ["experts: gate_up and down", "attention", "shared experts"]),
        ("qwen3-30b-a3b-fp8", ["attention", "router and lm_head"]),
    ],
)
def test_what_lies_outside_the_experts_is_uncovered(models: Path, name: str, parts: list[str]) -> None:
    uncovered = read_model(models / name).uncovered
    assert all(part.reason for part in uncovered)
    assert [part for part in parts if not any(known.what.startswith(part) for known in uncovered)] == []


def test_a_model_of_experts_only_has_no_uncovered_mlp(models: Path) -> None:
    uncovered = read_model(models / "qwen3-30b-a3b-fp8").uncovered
    assert [part.what for part in uncovered if "MLP" in part.what or "shared" in part.what] == []
