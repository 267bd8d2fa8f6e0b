"""A full GPU, NCCL's errors and what else only GPUs raise: one message with a remedy, from the rank that knows of it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paths import SMALL_NETWORK
from processes import free_port, start
from worldsize import cli
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.distributed import batch_plan, device_errors, joining, world
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.errors import GpuFull, NcclFailed, PeersUnreachable, UserError
from worldsize.models import factory
from worldsize.training import out_of_memory, precision
from worldsize.training.gradients import GradientComputer
from worldsize.training.objective import Objective

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# What torch raises, in the words of its sources: the allocator, cuDNN's search for an algorithm, cuBLAS, pinned memory.
FULL_TEXTS = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    "search": RuntimeError("FIND was unable to find an engine to execute this computation after trying 30 plans."),
    "choice": RuntimeError("GET was unable to find an engine to execute this computation"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "context": RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."),
}


class Small(nn.Module):
    """A network on a device whose memory holds ``most`` images."""

    def __init__(self, most: int, full: Exception) -> None:
        super().__init__()
        self.most, self.full, self.weight = most, full, nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        if len(x) > self.most:
            raise self.full
        return x.mean((2, 3)) @ self.weight


LARGE = "a forward pass of 256 images is too large, one of "


@pytest.mark.parametrize(
    ("most", "plan", "advice"),
    [
        (100, BatchPlan(256, 256, 1), f"{LARGE}64 fits: add --micro-batch 64 --forward-batch 64"),
        (100, BatchPlan(256, 32, 1, groups=8), f"{LARGE}64 fits: add --forward-batch 64"),
        # Seven micro-batches cannot be computed three by three.
        (200, BatchPlan(224, 32, 1, groups=7), "a forward pass of 224 images is too large, one of 32 fits: add --forward-"),
        (20, BatchPlan(256, 32, 1, groups=8), f"{LARGE}16 fits: add --micro-batch 16 --forward-batch 16"),
        (0, BatchPlan(256, 256, 1), "not even a forward pass of 1 images fits: lower --data.train-crop-size, or use"),
    ],
)
@pytest.mark.parametrize("full", FULL_TEXTS, ids=str)
def test_the_message_of_a_full_gpu_names_a_batch_that_fits_and_is_accepted(most, plan, advice, full):
    small = Small(most, FULL_TEXTS[full])
    values = {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch, "data": {"train_crop_size": 8}}
    recipe = Recipe.model_validate(values)
    objective = Objective(small, Normalise(recipe.data, CPU, torch.float32), precision.Precision("fp32", CPU), recipe)
    compute = GradientComputer(recipe, plan, 0, CPU, SimpleNamespace(model=small, objective=objective))
    with pytest.raises(RuntimeError) as failed:
        small(torch.zeros(256, 3, 8, 8))
    explained = device_errors.explain(failed.value, 0, lambda: out_of_memory.remedy(compute))
    assert isinstance(explained, UserError)
    assert str(explained).startswith(f"out of GPU memory: {advice}") and "Tried to allocate" not in str(explained)
    assert small.weight.grad is None
    if flags := re.findall(r"--(micro|forward)-batch (\d+)", str(explained)):
        accepted = recipe.model_dump() | {f"{name}_batch": int(number) for name, number in flags}
        assert batch_plan.plan(Recipe.model_validate(accepted), 1).forward_batch <= most


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."


def full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(FULL)


@pytest.mark.parametrize(
    ("place", "advice"),
    [
        ("worldsize.models.factory.build", "the GPU is full before training begins: stop what else uses it"),
        ("worldsize.training.supervision.build", "the GPU is full before training begins"),
        ("worldsize.training.build.build_state", "the GPU is full before training begins"),
        ("worldsize.training.trainer.evaluate", "an evaluation of 8 images at a time is too large: lower --micro-batch or"),
        ("worldsize.training.saver.Saver.snapshot", "saving needs room for a copy of the weights"),
    ],
)
def test_a_full_gpu_ends_each_phase_with_a_remedy_of_its_own(fails_in, place, advice):
    message = fails_in(place, "train", "digits", *SMALL)
    assert f"out of GPU memory: {advice}" in message and "(CUDA out of memory)" in message


def test_a_full_gpu_ends_eval_and_predict_with_a_remedy(fails_in, tmp_path):
    assert cli.main(["train", "digits", *SMALL, "--name", "a"]) == 0
    message = fails_in("worldsize.inference.evaluate_checkpoint.evaluate", "eval", "runs/a", "--micro-batch", "4")
    assert "an evaluation of 256 images at a time is too large: add a smaller --forward-batch, a multiple of" in message
    message = fails_in("worldsize.inference.trained.mean_logits", "predict", "runs/a", "--micro-batch", "4")
    assert "add a smaller --forward-batch, a multiple of --micro-batch 4" in message


SMALL = ("--model.name", SMALL_NETWORK, "--max-steps", "1", "--global-batch", "8", "--micro-batch", "8")


@pytest.fixture
def fails_in(tmp_path, monkeypatch, capfd):
    """fails_in(function, *arguments): stderr of the command, on a GPU that is full when the function is called."""
    monkeypatch.chdir(tmp_path)

    def run(place: str, *arguments: str) -> str:
        monkeypatch.setattr(place, full)
        assert cli.main(list(arguments)) == 64
        return capfd.readouterr().err

    return run


def test_a_failure_of_one_rank_is_printed_there_and_does_not_wait_for_the_others(tmp_path):
    """As mpirun and srun start ranks: no launcher of worldsize prints for them. Rank 1 is not the first of its machine."""
    script = ("train", "digits", *SMALL, "--max-steps", "3", "--global-batch", "16", "--name", "a")
    port, ranks = str(free_port()), []
    for rank in "01":
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(start(*script, cwd=tmp_path, rule="full_gpu_of_rank_1", **place))
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    codes = [process.returncode for process in ranks]
    assert codes[1] == 64 and codes[0] != 0
    assert "worldsize: out of GPU memory: a forward pass" in outputs[1]


@given(candidates=st.lists(st.integers(1, 5000), unique=True).map(sorted), limit=st.integers(0, 5000))
def test_bisection_ends_at_the_largest_batch_that_fits(candidates, limit):
    tried = []
    found = out_of_memory.largest(lambda n: tried.append(n) or n <= limit, candidates)
    assert found == max((n for n in candidates if n <= limit), default=None)
    assert len(tried) <= len(candidates).bit_length()


@pytest.mark.parametrize(("most", "chosen"), [(300, 256), (100, 64), (32, 32), (5, 256)])
def test_a_default_that_does_not_fit_is_lowered_to_what_the_run_accepts(most, chosen):
    """If nothing fits, it stays: the error in training says what to change."""
    plan = out_of_memory.smaller_plan(BatchPlan(256, 32, 1, groups=8), lambda n: n <= most)
    assert plan.forward_batch == chosen


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        (BatchPlan(256, 32, 1, groups=8), "256 images at a time is too large: add --forward-batch 128"),
        (BatchPlan(224, 32, 1, groups=7), "256 images at a time is too large: add --forward-batch 32"),
        # Of a network with dropout, whose micro-batches are not computed together.
        (BatchPlan(256, 32, 1), "256 images at a time is too large: add --forward-batch 32"),
        (None, "256 images at a time is too large: add a smaller --forward-batch, a multiple of --micro-batch 32"),
    ],
)
def test_the_remedy_for_an_evaluation_is_accepted(plan, advice):
    assert out_of_memory.of_evaluation(256, Recipe(), plan) == f"an evaluation of {advice}"


# From reports: NVIDIA/nccl #2076 and #1514, pytorch/torchtitan #1224.
REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a \
network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgressOpt: Call to recv from 172.16.0.7<33759> failed : Connection reset by peer"""
CLOSED = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3
ncclInternalError: Internal check failed.
Last error:
Net : Connection closed by remote peer node2<50260>"""
DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=\
WARN for details), NCCL version 2.26.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 6000"""


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (REMOTE, ("rank 3: NCCL failed with 172.16.0.7: ", "Connection reset by peer", "look at its own log first")),
        (CLOSED, ("rank 3: NCCL failed with node2: ", "look at its own log first")),
        (DUPLICATE, ("NCCL failed with rank 0 and rank 1: ", "two processes use the same GPU")),
        ("unhandled system error (run with NCCL_DEBUG=INFO)", ("NCCL_SOCKET_IFNAME",)),
        ("something new", ("NCCL_DEBUG=INFO",)),
    ],
)
def test_errors_of_nccl_name_the_peer_and_the_likely_cause(message, parts):
    explained = device_errors.explain(dist.DistBackendError(message), 3, str)
    assert isinstance(explained, PeersUnreachable) and explained.exit_code == 69
    assert all(part in str(explained) for part in parts), str(explained)


def test_nccl_without_memory_is_a_full_gpu():
    message = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    explained = device_errors.explain(dist.DistBackendError(message), 3, str)
    assert isinstance(explained, GpuFull) and "the GPU is full: lower --micro-batch" in str(explained)


def test_an_error_of_nccl_while_ranks_connect_is_explained(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise dist.DistBackendError(DUPLICATE)

    monkeypatch.setattr(joining, "_store", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(world, "_device", lambda rank_info, choice: GPU)
    with pytest.raises(NcclFailed, match=r"rank 1: NCCL failed with rank 0 and rank 1: .* two processes use the same GPU"):
        world.join(RankInfo("torchrun", 1, 2, 1, 2, ("127.0.0.1", 1)), Recipe(), 1)


def test_an_operation_without_a_deterministic_implementation_is_a_user_error():
    torch_message = (
        "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    explained = device_errors.explain(RuntimeError(torch_message), 0, str)
    assert isinstance(explained, UserError) and "leave out --deterministic" in str(explained)
    assert device_errors.explain(RuntimeError("something else"), 0, str) is None


class Broken(nn.Module):
    """A network that always fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.weight = error, nn.Parameter(torch.ones(1))

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: no kernel image is available for execution on the device",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_a_failing_gpu_is_not_taken_for_an_image_size_that_does_not_fit(text):
    with pytest.raises(RuntimeError, match=text.split(":")[0]):
        factory.check_input(Broken(RuntimeError(text)), 32, 2, "own")
    with pytest.raises(UserError, match="does not support images of 32 pixels"):
        factory.check_input(Broken(RuntimeError("sizes do not match")), 32, 2, "own")
