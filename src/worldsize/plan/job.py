"""The recipe as a job: images, steps, batches, messages and memory. Reads the network's shapes, no images."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.data.datasets.published import SIZES
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import EncodedSamples
from worldsize.distributed import batch_plan
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError
from worldsize.models import network_names
from worldsize.plan import traffic
from worldsize.plan.arguments import Feed
from worldsize.plan.model import BACKWARD, Traffic
from worldsize.plan.network import Network, profile

_HALF = ("bf16", "fp16")
_SAMPLED = 1000  # files whose size is read


@dataclass(frozen=True)
class Images:
    """Numbers of images and classes, and bytes per image file (0: in memory)."""

    train: int
    val: int
    classes: int
    file_bytes: float


@dataclass(frozen=True)
class Job:
    """What does not depend on the machines."""

    recipe: Recipe
    images: Images
    network: Network

    @property
    def traffic(self) -> Traffic:
        return traffic.of_recipe(self.recipe, self.network.tensors)

    def plan(self, devices: int) -> BatchPlan:
        """How this many devices share a step.

        Raises:
            UserError: they cannot; names the numbers that can.
        """
        try:
            shared = batch_plan.plan(self.recipe, devices)
        except UserError as error:
            raise UserError(f"--devices {devices}: {error}\nOr keep the batch of each device with --weak.") from None
        if self.recipe.forward_batch is not None or self.recipe.device == "cpu":
            return shared
        return self.largest_passes(shared)

    def largest_passes(self, plan: BatchPlan) -> BatchPlan:
        """The plan with forward passes as large as a GPU needs, where the strategy allows it."""
        strategy = parallel.strategy_class(self.recipe.parallel)
        if not strategy.allows_merged_forward(self.recipe.parallel):
            return plan
        return batch_plan.with_largest_forward_batch(plan, batch_plan.GPU_BATCH)

    def doubled(self) -> Job:
        """The job with batches twice as large."""
        name = "global_batch" if self.recipe.per_process_batch is None else "per_process_batch"
        return replace(self, recipe=self.recipe.model_copy(update={name: 2 * getattr(self.recipe, name)}))

    def cheaper_passes(self, plan: BatchPlan) -> str:
        """Flags that the recipe does not use yet and that make a pass cheaper for the host; empty if there are none."""
        recipe = self.recipe
        compiled = recipe.model.compile if recipe.model.compile != "auto" else recipe.device != "cpu"
        known = compiled or network_names.is_built_in(recipe.model.name)
        graphs = recipe.cuda_graphs if recipe.cuda_graphs != "auto" else known
        alone = recipe.device != "cpu" and plan.world_size == 1
        flags = {"--model.compile": not compiled, "--cuda-graphs": alone and not graphs and not recipe.not_captured}
        return " or ".join(flag for flag, unused in flags.items() if unused)

    def relative_work(self, plan: BatchPlan) -> float:
        """Work per image, the mean over the steps, relative to the full training size: less with progressive resizing."""
        from worldsize.data.images.crops import crop_size

        data, images = self.recipe.data, self.images.train
        steps, in_epoch = plan.total_steps(self.recipe, images), plan.steps_per_epoch(images)
        work = [
            min(in_epoch, steps - start) * (crop_size(data, epoch) / data.train_crop_size) ** 2
            for epoch, start in enumerate(range(0, steps, in_epoch))
        ]
        return sum(work) / steps if steps else 1.0

    def evaluations(self, plan: BatchPlan) -> int:
        """How often a run evaluates: after every some epochs and at its end, which may be within its first epoch."""
        between = plan.steps_per_epoch(self.images.train) * self.recipe.evaluate_every
        return max(1, -(-plan.total_steps(self.recipe, self.images.train) // between))

    def evaluation_work(self, plan: BatchPlan) -> float:
        """Work of all evaluations in training images: forward passes only, at the evaluation's size."""
        recipe, data = self.recipe, self.recipe.data
        views = 10 if data.val_ten_crop else 1 + data.val_mirror
        evaluations = self.evaluations(plan) * (1 + (recipe.average.name != "none"))
        work = (1 - BACKWARD) * (data.val_crop_size / data.train_crop_size) ** 2
        return views * evaluations * self.images.val * work

    def saves(self, plan: BatchPlan, seconds: float) -> float:
        """Checkpoints in a run that trains for this long."""
        when, images = self.recipe.checkpoint, self.images.train
        steps = plan.total_steps(self.recipe, images)
        return (
            seconds / (when.every_seconds or float("inf"))
            + steps // plan.steps_per_epoch(images) // (when.every_epochs or float("inf"))
            + steps / (when.every_steps or float("inf"))
            + 1
        )

    def memory(self, plan: BatchPlan) -> dict[str, float]:
        """Bytes per device by what they hold.

        Weights, gradients, optimizer state, averages and communication buffers are exact. Activations are what autograd
        keeps of one forward pass, at two bytes per element with bf16 or fp16 and four (eight) otherwise; caches of the
        framework, workspaces of kernels and the images themselves come on top.
        """
        recipe, parameters = self.recipe, self.network.parameters
        wide = 8 if recipe.precision == "fp64" else 4
        trained = sum(t.elements for t in self.network.tensors)
        copies = {"weights": parameters, "gradients": trained, "optimizer": trained * traffic.optimizer_tensors(recipe)}
        if recipe.average.name != "none":
            copies["average"] = parameters
        held = {name: float(wide * count) for name, count in copies.items()}
        held["buffers"] = _buffers(recipe, plan, self.traffic, wide * trained)
        # auto is bf16 wherever the hardware has it.
        element = 2 if recipe.precision in (*_HALF, "auto") else wide
        held["activations"] = self.network.activation_elements * plan.forward_batch * element
        return held


def _buffers(recipe: Recipe, plan: BatchPlan, sent: Traffic, gradients: float) -> float:
    """Bytes that communication holds beyond the gradients themselves."""
    settings = recipe.parallel
    if plan.world_size == 1:
        return 0.0
    held = 0.0 if settings.gradient_as_bucket_view and settings.strategy in ("auto", "ddp") else gradients
    if settings.compression == "powersgd":
        return held + gradients + sent.size  # the errors that it adds to the next step; P and Q
    if settings.compression != "none":
        held += max(m.size for m in sent.messages)
    return held


def describe(recipe: Recipe, feed: Feed, smallest: int, weak: bool) -> Job:
    """The job of ``recipe``; with ``weak`` each device keeps the batch that it has with ``smallest`` devices.

    Raises:
        UserError: unknown number of images; the batch cannot be shared; see `network.profile`.
    """
    images = _images(recipe, feed)
    if weak and recipe.per_process_batch is None:
        shared = batch_plan.plan(recipe, smallest)
        recipe = recipe.model_copy(update={"per_process_batch": shared.per_process})
    return Job(recipe, images, profile(recipe, images.classes))


def _images(recipe: Recipe, feed: Feed) -> Images:
    found = _known(recipe) if recipe.data.root is None else _opened(recipe)
    if found is None and None in (feed.train_images, feed.classes):
        raise UserError(
            "plan does not know how many images and classes the recipe's folder has: pass --data.root FOLDER, or "
            "--train-images N --val-images N --classes N"
        )
    found = found or Images(0, 0, 0, 0.0)
    return replace(
        found,
        train=feed.train_images or found.train,
        val=found.val if feed.val_images is None else feed.val_images,
        classes=feed.classes or found.classes,
        file_bytes=found.file_bytes if feed.image_kb is None else 1000 * feed.image_kb,
    )


def _known(recipe: Recipe) -> Images | None:
    if recipe.data.name == "synthetic":
        return Images(recipe.data.samples, min(recipe.data.samples, 1024), recipe.data.classes, 0.0)
    size = SIZES.get(recipe.data.name)
    return None if size is None else Images(size.train, size.val, size.classes, 1000 * size.file_kb)


def _opened(recipe: Recipe) -> Images:
    from worldsize.data import open_dataset

    with temporary_folder(prefix="worldsize-plan-") as cache:
        dataset = open_dataset(recipe.data, cache)
    known = SIZES.get(recipe.data.name)
    in_shards = 1000 * known.file_kb if known else 0.0
    size = _file_bytes(dataset.train) if isinstance(dataset.train, EncodedSamples) else in_shards
    return Images(len(dataset.train), len(dataset.val), len(dataset.classes), size)


def _file_bytes(samples: EncodedSamples) -> float:
    """The mean size of the files, or of some of them that are spread evenly over all."""
    sizes = []
    for index in range(0, len(samples), max(1, len(samples) // _SAMPLED)):
        with suppress(BrokenImage):
            sizes.append(samples.length(index))
    return fmean(sizes) if sizes else 0.0
