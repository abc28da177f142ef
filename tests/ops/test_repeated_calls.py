"""Calls like one that was made before launch again unchecked, and only those: shown with the driver's double, without a GPU."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from doubles.builder import InstantBuilder
from doubles.driver import DriverDouble
from doubles.tensors import pretend, pretend_gpus
from torch._subclasses.fake_tensor import FakeTensorMode

from deepgemm_jit import ops
from deepgemm_jit.errors import ContextMismatchError, DriverError, OperandError
from deepgemm_jit.ops import launching, prepared
from deepgemm_jit.ops.checks import check_gemm
from deepgemm_jit.service import KernelService, default_service

pytestmark = pytest.mark.none

E4M3, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
M, N, K, GROUPS = 128, 256, 512, 3
LAYOUTS = ("dense", "row_index", "prefix_sums", "masked")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    """The driver of the service that operations use; the primary context of GPU 0 is current."""
    double = DriverDouble(gpus=2)
    double.push_context(double.retain_primary(0))
    service = KernelService(builder=InstantBuilder(), driver=double)  # type: ignore[arg-type]
    monkeypatch.setattr("deepgemm_jit.service.service._DEFAULT", {"service": service})
    return double


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The raw handle of the current stream by GPU."""
    monkeypatch.setattr("deepgemm_jit.ops.quant.empty_m_major", lambda shape, device: aligned(*shape[::-1], dtype=F32).T)
    return pretend_gpus(monkeypatch)


@pytest.fixture
def checks_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that were checked in full."""
    made: list[str] = []

    def counting(operation: str, *arguments: Any, **options: Any) -> None:
        made.append(operation)
        check_gemm(operation, *arguments, **options)

    monkeypatch.setattr("deepgemm_jit.ops.checks.check_gemm", counting)
    return made


def aligned(*shape: int, dtype: torch.dtype, gpu: int = 0) -> torch.Tensor:
    return pretend(torch.empty(shape, dtype=dtype), gpu)


class Operands:
    """Operands of one call, which a test may exchange one by one."""

    def __init__(self, layout: str = "dense", fp8: bool = True, gpu: int = 0, m: int = M, n: int = N, k: int = K) -> None:
        self.layout, self.fp8 = layout, fp8
        a_lead, b_lead = ((GROUPS,) if layout == "masked" else ()), (() if layout == "dense" else (GROUPS,))
        dtype = E4M3 if fp8 else BF16
        self.a, self.b = aligned(*a_lead, m, k, dtype=dtype, gpu=gpu), aligned(*b_lead, n, k, dtype=dtype, gpu=gpu)
        self.a_scale = pretend(torch.empty((*a_lead, k // 128, m)).transpose(-1, -2), gpu)
        self.b_scale = aligned(*b_lead, -(-n // 128), k // 128, dtype=F32, gpu=gpu)
        self.out = aligned(*a_lead, m, n, dtype=BF16, gpu=gpu)
        self.groups = aligned(m if layout == "row_index" else GROUPS, dtype=I32, gpu=gpu)
        self.expected_m = 64

    def run(self) -> None:
        prefix = "" if self.layout == "dense" else "m_grouped_"
        suffix = {"dense": "", "masked": "_masked"}.get(self.layout, "_contiguous")
        call = getattr(ops, f"{prefix}{'fp8' if self.fp8 else 'bf16'}_gemm_nt{suffix}")
        a, b = ((self.a, self.a_scale), (self.b, self.b_scale)) if self.fp8 else (self.a, self.b)
        if self.layout == "dense":
            call(a, b, self.out)
        elif self.layout == "masked":
            call(a, b, self.out, self.groups, self.expected_m)
        else:
            call(a, b, self.out, self.groups, use_psum_layout=self.layout == "prefix_sums")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_the_second_call_is_a_question_for_the_context_and_a_launch(
    driver: DriverDouble, streams: dict[int, int], checks_made: list[str], layout: str, fp8: bool
) -> None:
    operands = Operands(layout, fp8)
    operands.run()
    driver.calls.clear()
    for _ in range(3):
        operands.run()
    assert {name: count for name, count in driver.calls.items() if name != "start"} == {"try_current_context_id": 3, "launch": 3}
    assert len(checks_made) == 1
    assert len({str(launch) for launch in driver.launches}) == 1, "all launches are the same but for where the arguments lie"
    assert driver.current_context() == driver.retain_primary(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_addresses_are_encoded_and_not_checked_again(
    driver: DriverDouble, streams: dict[int, int], checks_made: list[str], layout: str
) -> None:
    operands, others = Operands(layout), Operands(layout)
    operands.run()
    encoded = driver.calls["encode_tiled_map"]
    others.run()
    assert (len(checks_made), driver.calls["encode_tiled_map"]) == (1, 2 * encoded)
    operands.a = others.a
    operands.run()
    assert driver.calls["encode_tiled_map"] == 2 * encoded, "maps of addresses seen before are kept"
    assert len(driver.launches) == 3


def test_arguments_of_a_repeated_launch_are_those_of_a_checked_one(
    driver: DriverDouble, streams: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bytes] = []
    launch = driver.launch_as

    def reading(config: Any, function: int, params_pointer: int) -> None:
        launched.append(parameters(params_pointer, maps=3))
        launch(config, function, params_pointer)

    monkeypatch.setattr(driver, "launch_as", reading)
    first, second = Operands("row_index"), Operands("row_index")
    for operands in (first, second, first, second):
        operands.run()
    prepared_first, prepared_second = launched[:2]
    monkeypatch.setattr("deepgemm_jit.ops.gemm.try_again", lambda *_: False)
    for operands in (first, second):
        operands.run()
    assert launched[2:] == [prepared_first, prepared_second] * 2
    assert prepared_first != prepared_second


def parameters(pointer: int, maps: int) -> bytes:
    """Return the maps and the struct of arguments behind an array of pointers, as the driver copies them."""
    addresses = (ctypes.c_void_p * (maps + 1)).from_address(pointer)
    parts = [ctypes.string_at(address, 128) for address in addresses[:maps]]
    assert all(address % 64 == 0 for address in addresses[:maps]), "tensor maps lie at multiples of 64 bytes"
    return b"".join(parts) + ctypes.string_at(addresses[maps], 104)


def with_column_stride(scale: torch.Tensor) -> torch.Tensor:
    return pretend(torch.empty((K // 128, M + 4)).T[:M])


def with_row_gap(tensor: torch.Tensor) -> torch.Tensor:
    return pretend(torch.empty((tensor.shape[0], tensor.shape[1] + 16), dtype=tensor.dtype)[:, : tensor.shape[1]])


DIFFERENT: dict[str, Callable[[Operands], None]] = {
    "rows": lambda o: o.__init__(m=64),  # type: ignore[misc]
    "stride of A": lambda o: setattr(o, "a", with_row_gap(o.a)),
    "stride of B": lambda o: setattr(o, "b", with_row_gap(o.b)),
    "stride of D": lambda o: setattr(o, "out", with_row_gap(o.out)),
    "stride of the A scales": lambda o: setattr(o, "a_scale", with_column_stride(o.a_scale)),
    "a shorter K": lambda o: (
        setattr(o, "a", pretend(o.a[:, :384])),
        setattr(o, "b", pretend(o.b[:, :384])),
        setattr(o, "a_scale", pretend(o.a_scale[:, :3])),
        setattr(o, "b_scale", pretend(o.b_scale[:, :3])),
    ),  # the same addresses under another shape
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_metadata_is_another_call(driver: DriverDouble, streams: dict[int, int], checks_made: list[str], what: str) -> None:
    operands = Operands()
    operands.run()
    DIFFERENT[what](operands)
    operands.run()
    assert len(checks_made) == 2
    operands.run()
    assert len(checks_made) == 2


WRONG: dict[str, Callable[[Operands], None]] = {
    "dtype of A": lambda o: setattr(o, "a", pretend(o.a.view(torch.uint8))),
    "dtype of B scales": lambda o: setattr(o, "b_scale", pretend(o.b_scale.view(torch.int32))),
    "shape of D": lambda o: setattr(o, "out", pretend(o.out[:-1])),
    "A at an odd address": lambda o: setattr(o, "a", pretend(o.a.as_strided((M - 1, K), (K, 1), 8))),
    "group data inside D": lambda o: setattr(o, "groups", pretend(o.out.view(-1)[: 2 * M].view(torch.int32))),
    "a tensor that requires grad": lambda o: setattr(o, "b_scale", o.b_scale.detach().requires_grad_()),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_the_checks_refuse_is_refused_after_a_right_call_too(
    driver: DriverDouble, streams: dict[int, int], what: str
) -> None:
    operands = Operands("row_index")
    operands.run()
    operands.run()
    WRONG[what](operands)
    with pytest.raises(OperandError):
        operands.run()
    assert len(driver.launches) == 2
    assert driver.current_context() == driver.retain_primary(0)


def test_an_address_that_no_copy_engine_takes_is_looked_at_each_time(
    driver: DriverDouble, streams: dict[int, int], checks_made: list[str]
) -> None:
    operands = Operands()
    operands.run()
    storage = torch.empty(K // 128 * M + 1)
    operands.a_scale = pretend(storage.as_strided((M, K // 128), (1, M), 1))
    assert operands.a_scale.data_ptr() % 16 == 4
    operands.run()
    operands.run()
    assert len(checks_made) == 3
    assert len(driver.launches) == 1 + 2 * 2, "each time the scales are laid out first"


def test_row_major_scales_are_laid_out_in_every_call(
    driver: DriverDouble, streams: dict[int, int], checks_made: list[str]
) -> None:
    operands = Operands()
    operands.a_scale = aligned(M, K // 128, dtype=F32)
    for _ in range(2):
        operands.run()
    assert len(checks_made) == 2
    assert len(driver.launches) == 2 * 2


@pytest.mark.parametrize("current", [0, 1, None])
def test_the_tensors_device_decides_and_the_callers_context_stays(
    driver: DriverDouble, streams: dict[int, int], current: int | None
) -> None:
    primaries = [driver.retain_primary(gpu) for gpu in (0, 1)]
    driver.pop_context()
    if current is not None:
        driver.push_context(primaries[current])
    before = driver.current_context()
    for _ in range(3):
        for gpu in (0, 1):
            Operands(gpu=gpu).run()
            assert driver.current_context() == before
    ids = [driver.try_context_id(primary) for primary in primaries]
    assert [launch.context_id for launch in driver.launches] == ids * 3
    assert len({launch.function for launch in driver.launches}) == 2


def test_operands_of_two_gpus_are_refused_after_right_calls_on_both(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands, others = Operands(gpu=0), Operands(gpu=1)
    operands.run()
    others.run()
    operands.b = others.b
    with pytest.raises(ContextMismatchError, match=r"cuda:1.*cuda:0"):
        operands.run()
    assert len(driver.launches) == 2


def test_a_reset_makes_the_call_a_new_one(driver: DriverDouble, streams: dict[int, int], checks_made: list[str]) -> None:
    operands = Operands()
    operands.run()
    operands.run()
    driver.reset_primary(0)
    driver.retain_primary(0)
    operands.run()
    assert len(checks_made) == 2
    old, _, new = driver.launches
    assert (old.context_id, old.function) != (new.context_id, new.function)


def test_a_green_stream_has_its_own_grid_and_a_foreign_one_is_refused(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands(m=4096)
    operands.run()
    streams[0] = driver.create_stream(driver.create_green_context(0, sms=16))
    operands.run()
    operands.run()
    assert [launch.grid[0] for launch in driver.launches] == [128, 16, 16]
    for foreign in (driver.create_context(0), driver.retain_primary(1)):
        streams[0] = driver.create_stream(foreign)
        with pytest.raises(ContextMismatchError, match="stream"):
            operands.run()
    assert len(driver.launches) == 3


def test_a_limit_of_sms_holds_from_the_next_call_on(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands(m=4096)
    for limit in (None, 24, 24, 200, 8, None):
        ops.set_num_sms(limit)
        operands.run()
    assert [launch.grid[0] for launch in driver.launches] == [128, 24, 24, 128, 8, 128]
    with pytest.raises(OperandError, match="at least 1"):
        ops.set_num_sms(0)


@pytest.mark.parametrize("limit", [1, 8, 24, 64])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 2112, 7168), (1, 7168, 16384), (64, 4096, 7168), (512, 4096, 7168)])
def test_no_more_blocks_run_than_the_limit_allows(
    driver: DriverDouble, streams: dict[int, int], m: int, n: int, k: int, limit: int
) -> None:
    ops.set_num_sms(limit)
    Operands(m=m, n=n, k=k).run()
    launch = driver.launches[-1]  # before it, perhaps, that of the scales' layout
    assert 0 < launch.grid[0] <= limit
    assert launch.grid[0] % launch.cluster == 0


def test_a_split_of_k_is_a_cluster_of_the_launch_also_when_it_is_made_again(
    driver: DriverDouble, streams: dict[int, int]
) -> None:
    operands = Operands(m=16, n=2112, k=7168)
    operands.run()
    operands.run()
    assert [(launch.cluster, launch.grid[0]) for launch in driver.launches] == [(4, 132)] * 2


def test_dependent_launch_is_on_and_off_from_the_next_call_on(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands()
    wanted = (False, True, True, False, True)
    try:
        for enabled in wanted:
            ops.set_pdl(enabled)
            assert ops.get_pdl() is enabled
            operands.run()
    finally:
        ops.set_pdl(False)
    assert tuple(launch.dependent for launch in driver.launches) == wanted


def test_a_call_that_was_kept_is_selected_anew_when_launches_overlap_otherwise(
    driver: DriverDouble, streams: dict[int, int]
) -> None:
    operands = Operands(m=16, n=2112, k=7168)
    try:
        for overlap in ({"enabled": False}, {"enabled": True}, {"enabled": True, "constant_weights": True}):
            ops.set_pdl(**overlap)
            operands.run()
            operands.run()
    finally:
        ops.set_pdl(False)
    assert [launch.cluster for launch in driver.launches] == [4, 4, 2, 2, 4, 4]


def test_a_launch_that_fails_is_an_error_and_not_made_twice(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands(gpu=1)
    operands.run()
    driver.fail_next("launch", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    with pytest.raises(DriverError, match="OUT_OF_RESOURCES"):
        operands.run()
    assert driver.current_context() == driver.retain_primary(0)
    operands.run()
    assert len(driver.launches) == 2


def test_an_unloaded_kernel_is_loaded_again_by_the_next_call(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands()
    operands.run()
    operands.run()
    assert default_service().unload() == 1
    assert driver.libraries_loaded == 0
    operands.run()
    assert (driver.libraries_loaded, len(driver.launches)) == (1, 3)
    assert driver.launches[0].function != driver.launches[2].function


def test_the_memo_is_bounded(driver: DriverDouble, streams: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_CAPACITY", 5)
    for rows in range(4, 260, 4):
        operands = Operands(m=rows)
        operands.run()
        operands.run()
        assert len(default_service().prepared(default_service().contexts.current())) <= 5
    assert len(driver.launches) == 128


def test_eight_threads_repeat_calls_of_both_gpus(driver: DriverDouble, streams: dict[int, int]) -> None:
    raised: list[BaseException] = []
    calls = [Operands(gpu=0), Operands(gpu=1), Operands("masked", gpu=0), Operands("masked", gpu=1)]
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        try:
            for turn in range(100):
                calls[(number + turn) % 4].run()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert len(driver.launches) == 800
    assert driver.libraries_loaded == len({launch.function for launch in driver.launches})


# --- who traces or watches gets the operator


def test_plain_tensors_run_without_the_dispatcher_and_all_else_goes_through_it(streams: dict[int, int]) -> None:
    assert not prepared.is_watched()
    with FakeTensorMode():
        assert prepared.is_watched()
    with torch.overrides.BaseTorchFunctionMode():
        assert prepared.is_watched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert prepared.is_watched()
    assert not prepared.is_watched()
    seen: list[bool] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(prepared.is_watched())
        return x

    torch.func.vmap(watched)(torch.empty(2))
    with warnings.catch_warnings(action="ignore"):
        torch.jit.trace(watched, torch.empty(2), check_trace=False)
    assert seen == [True, True]
    plain = (torch.empty(2), torch.nn.Parameter(torch.empty(2), requires_grad=False))
    assert prepared.are_plain(plain)
    assert not prepared.are_plain((*plain, 5))  # type: ignore[arg-type]
    fake = FakeTensorMode()
    with fake:
        inside = torch.empty(2)
    assert not prepared.are_plain((inside,))


# --- launches that overlap


def early_reads(driver: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each GEMM that is prepared, whether it reads B before it waits."""
    seen: list[bool] = []
    prepare = launching.prepare_gemm

    def watching(*arguments: Any, waits_for_tokens: bool = False, **options: Any) -> Any:
        seen.append(waits_for_tokens)
        return prepare(*arguments, waits_for_tokens=waits_for_tokens, **options)

    monkeypatch.setattr(launching, "prepare_gemm", watching)
    return seen


def test_only_dense_gemms_read_constant_weights_early_and_never_a_copy_of_our_own(
    driver: DriverDouble, streams: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = early_reads(driver, monkeypatch)
    monkeypatch.setattr("deepgemm_jit.ops.gemm.transposed_bytes", lambda _call, b: aligned(*b.shape[::-1], dtype=E4M3))
    ops.set_pdl(True, constant_weights=True)
    try:
        for layout in LAYOUTS:
            Operands(layout).run()
        dense = Operands()
        n_major = aligned(K, N, dtype=E4M3), aligned(K // 128, N // 128, dtype=F32)
        ops.fp8_gemm_nn((dense.a, dense.a_scale), n_major, dense.out)
    finally:
        ops.set_pdl(False)
    Operands().run()
    assert early == [True, False, False, False, False, False]


@pytest.mark.parametrize("given", [("no", False), (1, False), (True, "yes")])
def test_dependent_launch_is_on_or_off_and_nothing_else(given: tuple[Any, Any], driver: DriverDouble) -> None:
    with pytest.raises(OperandError, match="must be True or False"):
        ops.set_pdl(given[0], constant_weights=given[1])
    assert not ops.get_pdl()


def test_memory_that_is_gone_is_refused_also_by_a_call_like_an_earlier_one(driver: DriverDouble, streams: dict[int, int]) -> None:
    operands = Operands()
    operands.run()
    operands.b.untyped_storage().resize_(0)
    with pytest.raises(OperandError, match="b has no memory"):
        operands.run()
    assert len(driver.launches) == 1
