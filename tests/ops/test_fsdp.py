"""FSDP2: sharded experts train as in one process; what reaches a kernel is plain, or is refused."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import build, harness
from models import mlp
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusible import (
    MXFP4,
    MXFP8,
    NVFP4,
    ArgumentError,
    Delayed,
    Float8Block,
    Float8Row,
    Float8Tensor,
    GroupedLinear,
    GroupedTensor,
    QuantizedGroupedTensor,
    Sequential,
    SwiGLU,
    grouped_gemm,
    interleaved,
    quantize_,
    same_weights,
)
from fusible.ops.formats.recipe import Recipe
from fusible.ops.quantized import weights as quantized_weights

ROOT = Path(__file__).resolve().parents[2]
CALL = {"split_sizes": torch.tensor([2, 3]), "scales": torch.linspace(0.1, 0.9, 5)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process that shards over itself: hooks, DTensors and dtypes are as they are with many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def experts(**how: object) -> Sequential:
    torch.manual_seed(0)
    return mlp(2, 6, 8, act=SwiGLU(**how))


@pytest.mark.parametrize("devices", ["", pytest.param("0,1", marks=pytest.mark.cuda)])
def test_two_processes_train_as_one(devices: str) -> None:
    """Twenty steps, in float32 and with bfloat16 parameters; see the example."""
    if devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": devices,
    }
    command = [sys.executable, str(ROOT / "examples" / "fsdp.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "returned a view tensor" not in done.stderr
    off = {kind: float(value) for kind, value in re.findall(r"(\w+): 4 of 8 experts.* at most (\S+)", done.stdout)}
    assert off.keys() == {"float32", "bfloat16"}
    assert off["float32"] < 1e-5
    assert done.stdout.count("RoutedMLP") == 2  # for each of the models, whose equal layers share a row
    assert ("hopper (activation in the epilogue)" in done.stdout) == bool(devices)


def test_the_script_of_the_docs_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    page = (ROOT / "docs" / "fsdp.md").read_text()
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RoutedMLP") == 1  # the first process prints


def test_sharded_experts_are_fused_and_give_the_same(mesh: DeviceMesh) -> None:
    x, plain, sharded = torch.randn(5, 6), experts(), fully_shard(experts(), mesh=mesh)
    y = sharded(x, **CALL)
    y.sum().backward()
    expected = plain(x, **CALL)
    expected.sum().backward()

    torch.testing.assert_close(y, expected)
    assert [step.name for step in sharded.explain().steps] == ["GroupedMLP"]
    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


RECIPES = (
    Float8Block(),
    Float8Row(),
    Float8Tensor(gradient="e5m2"),
    Float8Tensor(delayed=Delayed(history=2)),
    MXFP8(),
    NVFP4(stochastic_rounding=False),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_sharded_experts_under_a_recipe_give_the_same(mesh: DeviceMesh, recipe: Recipe) -> None:
    """Weights are gathered in 16 bits, and quantised where they have been gathered."""

    def quantised() -> Sequential:
        options = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe}
        torch.manual_seed(0)
        return Sequential(GroupedLinear(2, 32, 64, **options), SwiGLU(), GroupedLinear(2, 32, 32, **options))

    x, plain, sharded = torch.randn(5, 32).bfloat16(), quantised(), fully_shard(quantised(), mesh=mesh)
    for _ in range(2):
        results = [model(x, split_sizes=CALL["split_sizes"]) for model in (sharded, plain)]
        for result in results:
            result.sum().backward()
        assert torch.equal(*results)

    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), other.grad)


class Layers(torch.nn.Module):
    """Experts of one shape, one after the other: what one has gathered lies where that of others was before."""

    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": False, "dtype": torch.bfloat16, **options}
        layers = [
            Sequential(GroupedLinear(2, 64, 128, **options), SwiGLU(), GroupedLinear(2, 64, 64, **options))
            for _ in range(3)
        ]
        self.layers = torch.nn.ModuleList([fully_shard(layer, mesh=mesh) if mesh else layer for layer in layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, split_sizes=CALL["split_sizes"])
        return x


@pytest.mark.parametrize("recipe", [None, Float8Block(), MXFP8()], ids=str)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("block", [nullcontext, same_weights])
def test_gradients_of_microbatches_add_up(mesh: DeviceMesh, recipe: Recipe | None, single: bool, block: Any) -> None:
    """FSDP2 takes gradients when that of the input is there, and frees weights whose copies may be kept."""
    options = {"recipe": recipe, "single_grouped_weight": single}
    plain, sharded = Layers(None, **options), fully_shard(Layers(mesh, **options), mesh=mesh)
    x = torch.randn(5, 64).bfloat16()
    for _ in range(2):
        with block():
            for _ in range(3):
                results = [model(x.clone().requires_grad_()) for model in (plain, sharded)]
                for result in results:
                    result.sum().backward()
                assert torch.equal(*results)
        for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad.full_tensor(), other.grad)
            for parameter in (mine, other):
                parameter.grad = None
                parameter.data.mul_(0.5)


def test_kept_copies_are_those_of_a_weight_that_is_gathered_again(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, quantize = [], quantized_weights.quantize_weight
    monkeypatch.setattr(quantized_weights, "quantize_weight", lambda w, **k: seen.append(w) or quantize(w, **k))
    sharded = fully_shard(Layers(mesh, recipe=Float8Block()), mesh=mesh)
    with same_weights():
        for _ in range(3):
            sharded(torch.randn(5, 64).bfloat16()).sum().backward()

    assert len(seen) == 6  # two for each of the layers


@pytest.mark.parametrize("single", [True, False])
def test_sharded_weights_are_not_quantised_for_good(mesh: DeviceMesh, single: bool) -> None:
    model = fully_shard(experts(), mesh=mesh)
    linear = fully_shard(GroupedLinear(2, 32, 32, dtype=torch.bfloat16, single_grouped_weight=single), mesh=mesh)

    for module in (model, linear):
        with pytest.raises(ArgumentError, match=r"quantize_: weight.*: .* a DTensor; quantise before fully_shard"):
            quantize_(module, Float8Block())
    assert not linear.is_quantized


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("recipe", [Float8Block(), Float8Row(), MXFP8(), MXFP4(), NVFP4()], ids=str)
def test_bytes_are_gathered_of_weights_that_stay_quantised(mesh: DeviceMesh, recipe: Recipe, single: bool) -> None:
    options = {"dtype": torch.bfloat16, "single_grouped_weight": single}
    plain = quantize_(GroupedLinear(2, 32, 64, **options), recipe)
    sharded, loaded = (fully_shard(copy.deepcopy(plain), mesh=mesh) for _ in range(2))
    x = [torch.ones(5, 32).bfloat16().requires_grad_() for _ in range(2)]
    results = [op(rows, split_sizes=CALL["split_sizes"]) for op, rows in zip((plain, sharded), x, strict=True)]
    for result in results:
        result.sum().backward()
    loaded.load_state_dict(sharded.state_dict())

    assert torch.equal(*results)
    assert torch.equal(x[0].grad, x[1].grad)
    assert sharded.state_dict()["weight" if single else "weight0"].dtype.itemsize == 1


@pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
def test_sharded_experts_train_on_our_kernels(mesh: DeviceMesh) -> None:
    """The kernels of a GPU are emulated."""
    with harness.installed(harness.Emulation(build.build())):
        plain = mlp(2, 8, 8, dtype=torch.bfloat16)
        sharded, x = fully_shard(copy.deepcopy(plain), mesh=mesh), torch.randn(5, 8, dtype=torch.bfloat16)
        call = {name: tensor.clone() for name, tensor in CALL.items()}  # the emulation knows what is younger than it
        optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (plain, sharded)]
        for _ in range(4):
            expected, y = plain(x, **call), sharded(x, **call)
            assert torch.equal(y, expected)
            for output, optimizer in zip((expected, y), optimizers, strict=True):
                output.float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not torch.equal(y, plain(x, **call))  # the parameters have changed
        (step,) = sharded.explain().steps

    assert (step.name, step.kernel) == ("GroupedMLP", "hopper (activation in the epilogue) + hopper")


def test_mixed_precision_leaves_the_scales_alone(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model = fully_shard(experts(), mesh=mesh, mp_policy=policy)
    x, scales = torch.randn(5, 6, dtype=torch.bfloat16), torch.linspace(0.1, 0.9, 5).requires_grad_()
    y = model(x, split_sizes=CALL["split_sizes"], scales=scales)
    y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert scales.grad is not None
    assert scales.grad.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_sharded_parameters_outside_of_the_hooks_are_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(experts(), mesh=mesh)

    with pytest.raises(ArgumentError, match=r"got a DTensor placed as .*Shard\(dim=0\).*call the module"):
        model[0](torch.randn(5, 6), split_sizes=[2, 3])


def test_sharded_bias_beside_a_whole_weight_is_refused(mesh: DeviceMesh) -> None:
    linear = GroupedLinear(2, 6, 8)
    linear.bias = torch.nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Shard(0)]))

    with pytest.raises(ArgumentError, match=r"GroupedLinear: bias: expected a plain tensor, got a DTensor"):
        linear(torch.randn(5, 6), split_sizes=[2, 3])


@pytest.mark.parametrize(("name", "reader"), [("x", 0), ("split_sizes", 0), ("scales", 2)])
def test_sharded_arguments_are_refused(mesh: DeviceMesh, name: str, reader: int) -> None:
    """Also where a call with tensors of the same shapes went before. Kernels would read memory that is not there."""
    model, arguments = experts(), {"x": torch.randn(5, 6), **CALL}
    y = model(**arguments)
    sharded = {name: distribute_tensor(arguments[name], mesh, [Replicate()])}

    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"op {reader} .*: {name}: .* got a DTensor .*give {name}.to_local"):
            model(**arguments | sharded)
    assert torch.equal(model(**arguments | {name: sharded[name].to_local()}), y)


def test_tensor_that_is_on_its_way_is_refused() -> None:
    on_its_way = AsyncCollectiveTensor(torch.randn(5, 6))

    with pytest.raises(ArgumentError, match=r"x: expected a plain tensor, got a AsyncCollectiveTensor.*x.wait"):
        experts()(on_its_way, **CALL)
    assert experts()(on_its_way.wait(), **CALL).shape == (5, 6)


def test_sharded_output_of_another_module_is_refused(mesh: DeviceMesh) -> None:
    class Distribute(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(x, mesh, [Replicate()])

    with pytest.raises(ArgumentError, match=r"op 1 \(SwiGLU\): x: expected a plain tensor, got a DTensor"):
        Sequential(Distribute(), SwiGLU())(torch.randn(5, 6))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: grouped_gemm(x, torch.randn(2, 8, 6), CALL["split_sizes"]),
        lambda x: grouped_gemm(torch.randn(5, 6), x.view(1, 5, 6), torch.tensor([5])),
        lambda x: GroupedTensor(x, CALL["split_sizes"]),
        lambda x: QuantizedGroupedTensor.quantize(x, Float8Block(), CALL["split_sizes"]),
    ],
    ids=["grouped_gemm a", "grouped_gemm b", "GroupedTensor", "quantize"],
)
def test_functions_refuse_sharded_tensors(mesh: DeviceMesh, read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(ArgumentError, match=r"expected a plain tensor, got a DTensor placed as \(Replicate\(\),\)"):
        read(distribute_tensor(torch.randn(5, 6), mesh, [Replicate()]))


def test_saved_shards_are_the_parameters(mesh: DeviceMesh) -> None:
    model = fully_shard(experts(layout=interleaved(2)), mesh=mesh)
    plain = experts(layout=interleaved(2))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert isinstance(saved["0.weight"], DTensor)
    assert torch.equal(saved["0.weight"].full_tensor(), plain[0].weight)
    assert int(saved["0._extra_state"]) == 2
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)


def test_transformers_model_trains_sharded(mesh: DeviceMesh) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from hugging_face import experts_of, make

    import fusible.integrations.transformers

    losses: list[list[float]] = []
    for sharded in (False, True):
        model = make("gpt-oss")
        model.set_experts_implementation("fusible")
        for layer in model.model.layers if sharded else ():
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh) if sharded else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses.append([])
        for i in range(3):
            ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(i))
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    layers = fusible.explain(model).layers
    assert [layer.explanation.steps[0].name for layer in layers] == ["RoutedMLP"] * len(experts_of(model))
    assert layers
