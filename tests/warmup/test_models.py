"""Reading a model's config: what is understood, what is named as uncovered, what is refused and how."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepgemm_jit.errors import OperandError, UnsupportedError
from deepgemm_jit.warmup import read_model
from deepgemm_jit.warmup.models import Scheme

pytestmark = pytest.mark.none

Varied = Callable[[dict[str, Any]], Path]
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


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
    (layer,) = read_model(models / name).experts
    assert (layer.hidden_size, layer.width, layer.experts, layer.per_token) == (
        hidden,
        width,
        experts,
        per_token,
    )


def test_a_folder_and_its_file_read_the_same(models: Path) -> None:
    assert read_model(models / "deepseek-v3") == read_model(str(models / "deepseek-v3" / "config.json"))


def test_the_mixtral_family_keeps_the_width_of_an_expert_in_intermediate_size(varied: Varied) -> None:
    changes = {"num_experts": ..., "moe_intermediate_size": ..., "num_local_experts": 8, "intermediate_size": 14336}
    (layer,) = read_model(varied(changes)).experts
    assert (layer.experts, layer.experts_name) == (8, "num_local_experts")
    assert (layer.width, layer.width_name) == (14336, "intermediate_size")


def test_a_config_that_also_holds_a_vision_model_is_read_through_its_text_config(varied: Varied) -> None:
    text = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 64, "num_experts_per_tok": 4}
    keys = {"hidden_size": ..., "moe_intermediate_size": ..., "num_experts": ..., "num_experts_per_tok": ...}
    (layer,) = read_model(varied({**keys, "text_config": text})).experts
    assert (layer.hidden_size, layer.width, layer.experts) == (4096, 1536, 64)


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("value", [..., None, 0, -8, "768", 768.0, True, [768], 2**31, 2**63, "\x1b[2J\n"], ids=repr)
def test_a_missing_or_meaningless_size_is_refused_by_its_key(varied: Varied, key: str, value: object) -> None:
    folder = varied({key: value})
    with pytest.raises(OperandError, match=key) as caught:
        read_model(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert value is ... or key not in ("hidden_size", "num_experts_per_tok") or repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
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
        read_model(varied({"hidden_size": ..., "num_experts_per_tok": 0, "quantization_config": 5, "n_shared_experts": "1"}))
    assert len(caught.value.faults) == 4


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
        ("quantization_config.weight_block_size", [1, 32]),
        ("quantization_config.weight_block_size", [128, 1]),
        ("quantization_config.weight_block_size", [64, 128]),
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


@pytest.mark.parametrize("block", [128, "[128, 128]", [128.0, 128.0], [128], [128, 128, 128], [True, 128], [], {}, [None, 128]])
def test_a_weight_block_that_is_not_two_whole_numbers_is_refused_by_key_and_value(varied: Varied, block: object) -> None:
    with pytest.raises(OperandError) as caught:
        read_model(varied({"quantization_config.weight_block_size": block}))
    assert f"quantization_config.weight_block_size = {block!r}, needed: a list of two whole numbers" in str(caught.value)


def test_a_quantization_without_fmt_is_e4m3(varied: Varied) -> None:
    assert read_model(varied({"quantization_config.fmt": ...})).experts[0].scheme is Scheme.BLOCKS


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, Scheme.BLOCKS),
        ({"quantization_config.activation_scheme": "static"}, Scheme.BLOCKS),
        ({"quantization_config.scale_fmt": "ue8m0"}, Scheme.BLOCKS),
        ({"quantization_config.scale_fmt": "float"}, Scheme.BLOCKS),
        ({"quantization_config.weight_block_size": [1, 128]}, Scheme.ROWS),
        ({"quantization_config.weight_block_size": None}, Scheme.TENSOR),
        ({"quantization_config.weight_block_size": None, "quantization_config.activation_scheme": "static"}, Scheme.TENSOR),
        ({"expert_dtype": "fp4"}, Scheme.FP4),
        ({"quantization_config.expert_dtype": "fp4"}, Scheme.FP4),
        ({"quantization_config.expert_dtype": "fp4", "quantization_config.activation_scheme": "static"}, Scheme.FP4),
        ({"expert_dtype": "fp8"}, Scheme.BLOCKS),
        ({"quantization_config": ...}, Scheme.BF16),
        ({"quantization_config": None}, Scheme.BF16),
        ({"quantization_config": ..., "torch_dtype": ..., "dtype": "bfloat16"}, Scheme.BF16),
        ({"quantization_config.modules_to_not_convert": ["lm_head", "mlp.experts"]}, Scheme.BF16),
        ({"quantization_config.modules_to_not_convert": None}, Scheme.BLOCKS),
        ({"quantization_config.modules_to_not_convert": []}, Scheme.BLOCKS),
    ],
)
def test_the_config_says_how_the_weights_of_experts_are_kept(varied: Varied, changes: dict[str, Any], scheme: Scheme) -> None:
    assert read_model(varied(changes)).experts[0].scheme is scheme


@pytest.mark.parametrize("kept", [..., ["experts"]], ids=["not quantized", "experts not quantized"])
@pytest.mark.parametrize("dtype", ["float16", "float32", 5, ["bfloat16"]])
def test_experts_of_another_plain_dtype_are_refused_by_key_and_value(varied: Varied, kept: Any, dtype: object) -> None:
    changes = {"quantization_config": ...} if kept is ... else {"quantization_config.modules_to_not_convert": kept}
    with pytest.raises(UnsupportedError) as caught:
        read_model(varied({"torch_dtype": dtype, **changes}))
    assert f"torch_dtype = {dtype!r}" in caught.value.given
    assert "bfloat16" in caught.value.supported


def test_plain_experts_without_a_dtype_are_refused_by_the_keys_that_may_hold_it(varied: Varied) -> None:
    with pytest.raises(OperandError, match="keys quantization_config and dtype .or torch_dtype. are missing"):
        read_model(varied({"quantization_config": ..., "torch_dtype": ...}))
    with pytest.raises(OperandError, match="key dtype .or torch_dtype. is missing"):
        read_model(varied({"torch_dtype": ..., "quantization_config": {**FP8_CONFIG, "modules_to_not_convert": ["experts"]}}))


def test_fp4_experts_without_a_quantization_are_refused(varied: Varied) -> None:
    with pytest.raises(OperandError, match="expert_dtype = fp4 needs a quantization_config"):
        read_model(varied({"quantization_config": ..., "expert_dtype": "fp4"}))


@pytest.mark.parametrize("names", [5, True, 3.5, {"a": 1}, [5], [None], ["lm_head", 5], "mlp.experts", [["experts"]]], ids=repr)
def test_modules_that_are_no_list_of_names_are_refused_by_key_and_value(varied: Varied, names: object) -> None:
    with pytest.raises(OperandError) as caught:
        read_model(varied({"quantization_config.modules_to_not_convert": names}))
    assert f"modules_to_not_convert = {names!r}, needed: a list of names" in str(caught.value)


HOSTILE = ["\x1b[31mred\n\0", "\udcff", {"a": 1}, -1, 1.0, True, 2**31, "x" * 100_000, [[[[[[5]]]]]]]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize(
    "key",
    [
        "n_shared_experts",
        "shared_expert_intermediate_size",
        "first_k_dense_replace",
        "decoder_sparse_step",
        "moe_layer_freq",
        "mlp_only_layers",
        "text_config",
        "quantization_config",
        "hidden_size",
        "num_experts",
        "expert_dtype",
        "quantization_config.fmt",
        "quantization_config.quant_method",
        "quantization_config.activation_scheme",
        "quantization_config.weight_block_size",
        "quantization_config.modules_to_not_convert",
    ],
)
def test_what_a_config_holds_reaches_a_message_printable_and_short(varied: Varied, key: str, value: object) -> None:
    if key in ("text_config", "quantization_config") and isinstance(value, dict):
        return  # an object is what they should be
    folder = varied({key: value})
    with pytest.raises((OperandError, UnsupportedError)) as caught:
        read_model(folder)
    text = str(caught.value)
    assert f"{key} = " in text or "disagree" in text or "is more than" in text
    assert all(line.isprintable() for line in text.split("\n  - "))
    assert len(text) < 800 + len(str(folder))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mlp_only_layers": [0, 1]}, "mlp_only_layers = [0, 1]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq = [0, 1, 1]"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
    ],
)
def test_dense_layers_are_uncovered_however_a_config_counts_them(varied: Varied, changes: dict[str, Any], part: str) -> None:
    assert f"dense MLP layers ({part})" in [known.what for known in read_model(varied(changes)).uncovered]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not complete JSON"),
        (b"{", "not complete JSON"),
        (b'{"hidden_size": 20', "not complete JSON"),
        (b"[1, 2]", "a JSON list"),
        (b"3", "a JSON int"),
        (b"null", "a JSON NoneType"),
        (b"\x80\x04pickle", "not UTF-8: byte 0x80 at offset 0"),
        (b'{"a": "\xe4"}', "not UTF-8: byte 0xe4 at offset 7"),
        (b"\xef\xbb\xbf{}", "without a byte order mark"),
        ("{}".encode("utf-16"), "encoded in utf-16"),
        ("{}".encode("utf-16-be"), "encoded in utf-16-be"),
        ("{}".encode("utf-32"), "encoded in utf-32"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 100_000, "too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "too many digits"),
        (b" " * (16 << 20) + b"{}", "more than 16 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_json_object_is_refused_by_its_path_and_the_reason(tmp_path: Path, text: bytes, reason: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(OperandError, match=reason) as caught:
        read_model(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("given", [None, 5, b"config.json", ["config.json"], "a\0b"], ids=repr)
def test_what_is_no_path_is_refused_and_shown(given: Any) -> None:
    with pytest.raises(OperandError, match="is no path") as caught:
        read_model(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "device"])
def test_what_is_no_regular_file_is_refused_without_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / "config.json"
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(file.name)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(OperandError, match="is not a regular file") as caught:
        read_model(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", ["missing file", "missing folder", "empty folder", "too long a name"])
def test_what_cannot_be_read_is_refused_by_its_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "no-such-folder" / "config.json" if kind == "missing folder" else tmp_path / "model"
    if kind == "empty folder":
        path.mkdir()
    if kind == "too long a name":
        path = tmp_path / ("x" * 300)
    with pytest.raises(OperandError, match="cannot be read") as caught:
        read_model(path)
    assert str(path) in str(caught.value)


def test_one_layer_that_is_not_converted_leaves_the_experts_of_the_others(varied: Varied) -> None:
    kept = ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp.gate"]
    assert read_model(varied({"quantization_config.modules_to_not_convert": kept})).experts[0].scheme is Scheme.BLOCKS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("deepseek-v3", ["attention", "shared experts (n_shared_experts = 1)", "dense MLP layers (first_k_dense_replace = 3)"]),
        ("deepseek-v4-flash", ["attention", "shared experts"]),
        ("qwen3-30b-a3b-fp8", ["attention", "router and lm_head"]),
    ],
)
def test_what_lies_outside_the_experts_is_uncovered(models: Path, name: str, parts: list[str]) -> None:
    uncovered = read_model(models / name).uncovered
    assert all(part.reason and part.instead for part in uncovered)
    assert [part for part in parts if not any(known.what.startswith(part) for known in uncovered)] == []


def test_a_model_of_experts_only_has_no_uncovered_mlp(models: Path) -> None:
    uncovered = read_model(models / "qwen3-30b-a3b-fp8").uncovered
    assert [part.what for part in uncovered if "MLP" in part.what or "shared" in part.what] == []
