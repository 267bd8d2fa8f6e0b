"""Recipes from the files of other trainers."""

from __future__ import annotations

import inspect
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from timm.data.random_erasing import RandomErasing

from worldsize.config import listing, recipe_files
from worldsize.config.importing.convert import convert
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.optim.schedules import peak_lr

FFCV = """
data: {in_memory: 1, num_workers: 12}
dist: {world_size: 8}
logging: {folder: /tmp/}
lr: {lr: 1.7, lr_schedule_type: cyclic}
model: {arch: resnet50}
resolution: {end_ramp: 76, max_res: 192, min_res: 160, start_ramp: 65}
training: {batch_size: 512, bn_wd: 0, distributed: 1, epochs: 88, label_smoothing: 0.1, momentum: 0.9,
           optimizer: sgd, weight_decay: 0.0001, use_blurpool: 1}
validation: {lr_tta: true, resolution: 256}
"""
# A3 of "ResNet strikes back" as arguments of timm's train.py, with some defaults.
TIMM = """
aa: rand-m6-mstd0.5-inc1
amp: true
aug_repeats: 0
batch_size: 512
bce_loss: true
bce_target_thresh: 0.0
checkpoint_hist: 10
clip_grad: null
clip_mode: norm
color_jitter: 0.4
cooldown_epochs: 0
crop_pct: 0.95
cutmix: 1.0
decay_milestones: [30, 60]
decay_rate: 0.1
drop_path: null
epochs: 100
hflip: 0.5
img_size: 160
interpolation: bicubic
lr: 0.008
min_lr: 1.0e-06
mixup: 0.1
mixup_mode: batch
mixup_prob: 1.0
mixup_switch_prob: 0.5
model: resnet50
model_ema: false
momentum: 0.9
opt: lamb
opt_betas: null
opt_eps: null
ratio: [0.75, 1.3333333333333333]
recount: 1
remode: pixel
reprob: 0.0
scale: [0.08, 1.0]
sched: cosine
smoothing: 0.0
train_interpolation: bicubic
vflip: 0.0
warmup_epochs: 5
warmup_lr: 8.0e-07
weight_decay: 0.02
workers: 8
"""


# All arguments of train.py in timm 1.0 that TIMM does not have, with their defaults.
DEFAULTS = """
{amp_dtype: float16, aug_splits: 0, bce_pos_weight: null, bce_sum: false, bn_eps: null, bn_momentum: null,
 channels_last: false, class_map: '', color_jitter_prob: null, cutmix_minmax: null, data: null, data_dir: /data,
 dataset: '', dataset_download: false, dataset_trust_remote_code: false, decay_epochs: 90, device: cuda,
 device_modules: null, dist_bn: reduce, drop: 0.0, drop_block: null, drop_connect: null, epoch_repeats: 0.0,
 eval_metric: top1, experiment: '', fast_norm: false, fuser: '', gaussian_blur_prob: null, gp: null, grad_accum_steps: 1,
 grad_checkpointing: false, grayscale_prob: null, head_init_bias: null, head_init_scale: null, in_chans: null,
 initial_checkpoint: '', input_img_mode: null, input_key: null, input_size: null, jsd_loss: false,
 kd_distill_type: logit, kd_loss_type: kl, kd_model_name: null, kd_student_feature_dim: null,
 kd_teacher_feature_dim: null, kd_temperature: 4.0, kd_token_distill_type: soft, distill_loss_weight: null,
 task_loss_weight: null, layer_decay: null, layer_decay_min_scale: 0, layer_decay_no_opt_scale: null, local_rank: 0,
 log_interval: 50, log_wandb: false, lr_base: 0.1, lr_base_scale: '', lr_base_size: 256, lr_cycle_decay: 0.5,
 lr_cycle_limit: 1, lr_cycle_mul: 1.0, lr_k_decay: 1.0, lr_noise: null, lr_noise_pct: 0.67, lr_noise_std: 1.0,
 mean: null, mixup_off_epoch: 0, model_dtype: null, model_ema_decay: 0.9998, model_ema_force_cpu: false,
 model_ema_warmup: false, model_kwargs: {}, naflex_loader: false, naflex_loss_scale: linear, naflex_max_seq_len: 576,
 naflex_patch_size_probs: null, naflex_patch_sizes: null, naflex_train_seq_lens: [128, 256, 576, 784, 1024],
 no_aug: false, no_ddp_bb: false, no_prefetcher: false, no_resume_opt: false, num_classes: null, opt_kwargs: {},
 output: '', patience_epochs: 10, pin_mem: false, pretrained: false, pretrained_path: null, recovery_interval: 0,
 resplit: false, resume: '', save_images: false, sched_on_updates: false, seed: 42, split_bn: false,
 start_epoch: null, std: null, sync_bn: false, synchronize_step: false, target_key: null, torchcompile: null,
 torchcompile_mode: null, torchscript: false, train_crop_mode: null, train_num_samples: null, train_split: train,
 tta: 0, use_multi_epochs_loader: false, val_interval: 1, val_num_samples: null, val_split: validation,
 validation_batch_size: null, wandb_project: null, wandb_resume_id: '', wandb_tags: [], warmup_prefix: false,
 worker_seeding: all}
"""
COMPLETE = yaml.safe_load(DEFAULTS) | yaml.safe_load(TIMM)


def timm_settings(folder: Path, world_size: int = 1, **changes: object) -> tuple[Recipe, dict[str, str]]:
    """What a complete args.yaml with these changes becomes, and what of it is not converted."""
    conversion = convert(written(folder, yaml.safe_dump(COMPLETE | changes)), world_size)
    yaml.safe_dump(conversion.nested())
    return conversion.recipe(), conversion.left


def written(folder: Path, text: str) -> Path:
    (folder / "given.yaml").write_text(text)
    return folder / "given.yaml"


def test_timm_arguments_become_the_recipe_of_their_paper(tmp_path):
    conversion = convert(written(tmp_path, TIMM), world_size=4)
    assert not conversion.left
    ours, shipped = conversion.recipe().model_dump(), recipe_files.load("imagenet-a3").model_dump()
    assert ours["augment"] == shipped["augment"]
    assert ours["loss"] == shipped["loss"]
    assert ours["optimizer"] == shipped["optimizer"]
    assert ours["schedule"] == shipped["schedule"]
    for name in ("epochs", "global_batch", "label_smoothing"):
        assert ours[name] == shipped[name]
    assert ours["micro_batch"] == 512
    assert ours["data"] == shipped["data"] | {"val_resize_size": 168, "val_crop_size": 160}


def test_a_complete_file_leaves_no_line_over(tmp_path):
    recipe, left = timm_settings(tmp_path, 4)
    assert not left
    assert recipe == convert(written(tmp_path, TIMM), 4).recipe()


@pytest.mark.parametrize(
    ("opt", "scale", "peak"),
    [
        ("sgd", "", 0.1 * 4),
        ("lamb", "", 0.1 * 2),
        ("nadamw", "", 0.1 * 2),
        ("adamw", "linear", 0.1 * 4),
        ("sgd", "sqrt", 0.1 * 2),
    ],
)
def test_a_base_learning_rate_is_scaled_as_timm_does(tmp_path, opt, scale, peak):
    changes = {"lr": None, "opt": opt, "lr_base_scale": scale, "batch_size": 128, "grad_accum_steps": 2}
    recipe, left = timm_settings(tmp_path, 4, **changes, warmup_lr=0.002, min_lr="1e-6")
    assert not left
    assert (recipe.micro_batch, recipe.global_batch) == (128, 1024)
    assert peak_lr(recipe.optimizer, recipe.global_batch) == pytest.approx(peak)
    assert recipe.schedule.warmup_start * peak == pytest.approx(0.002)
    assert recipe.schedule.end * peak == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ({"opt": "lion"}, "optimizer.betas", (0.9, 0.99)),
        ({"opt": "lion", "opt_betas": [0.95, 0.98]}, "optimizer.betas", (0.95, 0.98)),
        ({"min_lr": "8e-5"}, "schedule.end", 0.01),  # a string in YAML 1.1
        ({"img_size": None, "crop_pct": 0.9}, "data.val_resize_size", 248),
        ({"img_size": None, "crop_pct": None}, "data.val_resize_size", 235),  # timm has 0.95 for its ResNet-50
        ({"model": "vit_small_patch16_224", "mean": None}, "data.mean", (0.5, 0.5, 0.5)),
        ({"amp_dtype": "bfloat16"}, "precision", "bf16"),
        ({"amp": False}, "precision", "fp32"),
        ({"pretrained": True}, "model.weights", "timm:resnet50"),
        ({"grad_accum_steps": 4}, "global_batch", 2048),
        ({"warmup_prefix": True}, "epochs", 105),
        ({"sched": "step", "decay_epochs": 30}, "schedule.milestones", (30, 60, 90)),
        ({"sched": "poly", "decay_rate": 0.5}, "schedule.power", 0.5),
        ({"bce_sum": True}, "loss.bce_reduction", "sum"),
        ({"head_init_bias": -6.9}, "model.head_bias", -6.9),
        ({"opt": "rmsprop"}, "optimizer.alpha", 0.9),
        ({"clip_grad": 5.0}, "optimizer.clip_norm", 1.0),  # LAMB's own
        ({"clip_grad": 0.5}, "optimizer.clip_norm", 0.5),
        ({"clip_grad": 5.0, "opt": "sgd"}, "optimizer.clip_norm", 5.0),
        ({"clip_grad": 0.1, "opt": "sgd", "clip_mode": "value"}, "optimizer.clip_value", 0.1),
        ({"clip_grad": 0.01, "opt": "sgd", "clip_mode": "agc"}, "optimizer.clip_agc", 0.01),
        ({"clip_grad": None, "opt": "sgd", "clip_mode": "agc"}, "optimizer.clips", []),
        ({"smoothing": 0.1, "bce_target_thresh": 0.2}, "label_smoothing", 0.0),  # timm's threshold erases it
        ({"smoothing": 0.1, "bce_target_thresh": 0.2, "bce_loss": False}, "label_smoothing", 0.1),
        ({"drop": 0.0}, "model.dropout", None),
        ({"drop": 0.0, "model": "ghostnet_100"}, "model.dropout", 0.0),  # whose default in timm is 0.2
        ({"hflip": 0.0}, "data.flip", False),
        ({"vflip": 0.5}, "augment.vflip", 0.5),
        ({"aa": "rand-m7-inc1"}, "augment.magnitude_std", 0),
        ({"aa": "rand-m15-mstd0.5-inc1"}, "augment.magnitude", 10),
        ({"aa": "rand-m15-mstd0.5-inc1"}, "augment.magnitude_std", 0),  # nearly all draws are above 10, and are clipped
        ({"dataset": "torch/cifar10"}, "data.name", "cifar10"),
        ({"dataset": "hfds/timm/imagenet-1k-wds"}, "data.name", "imagenet"),
        ({"sched": "multistep", "epochs": 50}, "schedule.milestones", (29,)),
        ({"aa": "3a"}, "augment.policy", "3-augment"),
        ({"aa": "3a", "color_jitter": 0.3}, "augment.color_jitter", (0.3, 0.3, 0.3, 0)),
        ({"color_jitter": 0.3}, "augment.color_jitter", (0, 0, 0, 0)),  # next to RandAugment
        ({"aa": "rand-mstd0.5-inc1"}, "augment.magnitude", 10),  # timm's default
    ],
)
def test_what_a_key_of_timm_becomes(tmp_path, changes, setting, value):
    recipe, left = timm_settings(tmp_path, **changes)
    assert not left
    assert attrgetter(setting)(recipe) == value


@pytest.mark.parametrize(
    ("opt", "mode", "reason"), [("lamb", "agc", "also clips the norm to 1"), ("sgd", "x", "norm, value, agc")]
)
def test_a_way_to_clip_that_has_no_equivalent_is_listed(tmp_path, opt, mode, reason):
    _, left = timm_settings(tmp_path, opt=opt, clip_grad=0.01, clip_mode=mode)
    assert reason in left["clip_mode"]


def test_without_timm_the_defaults_of_the_network_are_listed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    _, left = timm_settings(tmp_path, img_size=None)
    assert list(left) == ["model"] and "its size, mean, std are in timm: install it" in left["model"]


def test_other_networks_are_timms(tmp_path):
    given = yaml.safe_load(TIMM) | {"model": "vit_small_patch16_224", "drop_path": 0.1, "layer_decay": 0.75}
    recipe = convert(written(tmp_path, yaml.safe_dump(given)), 1).recipe()
    assert (recipe.model.name, recipe.model.drop_path) == ("timm:vit_small_patch16_224", 0.1)
    assert recipe.optimizer.layer_decay == 0.75


def test_rates_of_networks_whose_blocks_timm_does_not_know_are_named(tmp_path):
    recipe, left = timm_settings(tmp_path, model="poolformer_s12", layer_decay=0.7)
    assert recipe.optimizer.layer_decay == 0.7
    assert left == {"layer_decay": "timm has one rate for each 12 parameters of poolformer_s12; here each block has its own"}
    assert timm_settings(tmp_path, model="poolformer_s12", layer_decay=None)[1] == {}


def test_lamb_without_weight_decay_is_another_optimizer_in_timm(tmp_path):
    _, left = timm_settings(tmp_path, opt="lamb", weight_decay=0.0)
    assert list(left) == ["opt"] and "timm's LAMB does not scale the updates of a layer" in left["opt"]
    assert timm_settings(tmp_path, opt="lamb", weight_decay=0.02)[1] == {}


@pytest.mark.parametrize("name", ["imagenet-deit-s", "imagenet-convnext-t"])
def test_boxes_are_erased_as_by_timm(tmp_path, name):
    defaults = inspect.signature(RandomErasing).parameters
    area = tuple(defaults[end].default for end in ("min_area", "max_area"))
    ratio = (defaults["min_aspect"].default, 1 / defaults["min_aspect"].default)
    for recipe in (recipe_files.load(name), timm_settings(tmp_path, reprob=0.25)[0]):
        assert (recipe.augment.erasing_area, recipe.augment.erasing_ratio) == (area, ratio)


def test_timms_moving_average_becomes_ours(tmp_path):
    given = yaml.safe_load(TIMM) | {"model_ema": True, "model_ema_decay": 0.9998, "model_ema_warmup": True}
    average = convert(written(tmp_path, yaml.safe_dump(given)), 1).recipe().average
    assert (average.name, average.decay, average.warmup, average.every_steps) == ("ema", 0.9998, True, 1)


def test_an_ffcv_file_becomes_a_recipe(tmp_path):
    conversion = convert(written(tmp_path, FFCV), None)
    recipe = conversion.recipe()
    assert (recipe.global_batch, recipe.micro_batch, recipe.epochs) == (4096, 512, 88)
    assert recipe.schedule.milestones == (0, 2, 88)
    assert recipe.schedule.values == (1e-4, 1, 0)
    assert (recipe.optimizer.lr, recipe.optimizer.nesterov, recipe.optimizer.norm_weight_decay) == (1.7, False, 0)
    assert (recipe.optimizer.bias_weight_decay, recipe.precision) == (1e-4, "fp16")
    assert (recipe.data.train_crop_sizes, recipe.data.train_crop_epochs) == ((160, 192), (65, 76))
    assert (recipe.data.val_resize_size, recipe.data.val_crop_size) == (293, 256)
    assert recipe.model.blurpool and recipe.data.val_mirror
    assert list(conversion.left) == ["training.weight_decay"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mixup_mode", "elem"),
        ("aa", "augmix-m5"),
        ("aa", "rand-m9-mstd101-inc1"),  # a uniform magnitude
        ("aa", "rand-m11-mstd0.5-inc1"),  # half of what is drawn above 10 would be below it here
        ("aa", True),
        ("dataset", "tfds/oxford_iiit_pet"),
        ("warmup_lr", 1.0),
        ("min_lr", 1.0),
        ("opt", "adan"),
        ("train_interpolation", "random"),
        ("cooldown_epochs", 10),
        ("lr_cycle_limit", 2),
        ("mixup_off_epoch", 5),
        ("kd_model_name", "resnet152"),
        ("in_chans", 1),
        ("interpolation", "lanczos"),
        ("min_lr", "low"),
    ],
)
def test_what_has_no_equivalent_is_listed(tmp_path, key, value):
    _, left = timm_settings(tmp_path, **{key: value})
    assert left.keys() & {key, "lr"}


def test_the_operations_of_timms_augmix_are_named_as_others(tmp_path):
    _, left = timm_settings(tmp_path, aa="augmix-m5-w4-d2")
    assert left["aa"] == "--augment.policy augmix has the operations of torchvision"


def test_the_command_prints_a_recipe_that_loads(tmp_path, capsys):
    given = written(tmp_path, FFCV.replace("cyclic", "step"))
    assert listing.main(["import", str(given), "--world-size", "4"]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "ours.yaml").write_text(out)
    assert recipe_files.load(str(tmp_path / "ours.yaml")).global_batch == 2048
    assert "#  lr.lr_schedule_type: step" in out
    assert "lr.lr_schedule_type: step  (supported: cyclic)" in err


def test_a_value_of_several_lines_stays_a_comment(tmp_path, capsys):
    given = written(tmp_path, TIMM + "notes: |\n  first\n  seed: 7\n")
    assert listing.main(["import", str(given)]) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    assert "#  notes: first seed: 7  (" in (tmp_path / "ours.yaml").read_text()
    recipe_files.load(str(tmp_path / "ours.yaml"))


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a: 1", (), "neither timm's args.yaml nor an FFCV"),
        ("a: [", (), "is not valid YAML"),
        ("opt: sgd\nlr: 0.1\nlr: 0.2\n", (), "lr appears in lines 2 and 3"),
        (TIMM, ("--world-size", "0"), "at least 1"),
        (TIMM.replace("lr: 0.008", "lr: -1"), (), "optimizer.lr"),
    ],
)
def test_a_file_that_cannot_be_converted_is_an_error(tmp_path, text, arguments, message):
    with pytest.raises(UserError, match=message):
        listing.main(["import", str(written(tmp_path, text)), *arguments])


def test_against_lists_what_differs(capsys):
    assert listing.main(["imagenet-dle-mixup", "--against", "imagenet-dle"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["epochs", "250", "90"], ["augment.mixup", "0.2", "0"]]
