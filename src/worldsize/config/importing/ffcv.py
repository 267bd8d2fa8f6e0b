"""The YAML of ffcv-imagenet (rn50_configs, rn18_configs), whose keys are SECTION.NAME."""

from __future__ import annotations

from typing import Any

from worldsize.config.importing.base import Conversion, Convert, flag, ignore, only, to

# What train_imagenet.py does whatever the file says.
ALWAYS: dict[str, Any] = {
    "data.name": "imagenet",
    "optimizer.nesterov": False,
    "model.zero_init": False,
    "precision": "fp16",
}


# Its defaults, from the Section(...).params of train_imagenet.py (libffcv/ffcv-imagenet), for keys that the file lacks.
DEFAULTS: dict[str, Any] = {
    "model.arch": "resnet18",
    "resolution.min_res": 160,
    "resolution.max_res": 160,
    "resolution.end_ramp": 0,
    "resolution.start_ramp": 0,
    "lr.lr_schedule_type": "cyclic",
    "lr.lr": 0.5,
    "lr.lr_peak_epoch": 2,
    "validation.resolution": 224,
    "validation.lr_tta": 1,
    "training.batch_size": 512,
    "training.optimizer": "sgd",
    "training.momentum": 0.9,
    "training.weight_decay": 4e-5,
    "training.epochs": 30,
    "training.label_smoothing": 0.1,
    "training.use_blurpool": 0,
}


def _batch(conversion: Conversion, key: str, value: int) -> None:
    """Images per GPU: BatchNorm's statistics are over these."""
    batch = value * conversion.world_size
    conversion.settings |= {"micro_batch": value, "global_batch": batch, "optimizer.lr_reference_batch": batch}


def _epochs(conversion: Conversion, key: str, value: int) -> None:
    conversion.settings["epochs"] = value
    if conversion.given["lr.lr_schedule_type"] == "cyclic":
        peak = conversion.given["lr.lr_peak_epoch"]
        conversion.settings |= {
            "schedule.name": "piecewise",
            "schedule.milestones": [0, peak, value],
            "schedule.values": [1e-4, 1, 0],
            "schedule.warmup_epochs": 0,
        }


def _size(conversion: Conversion, key: str, value: int) -> None:
    conversion.settings["data.train_crop_size"] = value
    smallest, start, end = (conversion.given[f"resolution.{name}"] for name in ("min_res", "start_ramp", "end_ramp"))
    if smallest != value:
        end = max(end, start + 1)  # the first epoch at full size, after that of the smallest; it need not be later there
        conversion.settings |= {"data.train_crop_sizes": [smallest, value], "data.train_crop_epochs": [start, end]}


def _validation(conversion: Conversion, key: str, value: int) -> None:
    # Its center crop has 224/256 of the shorter side.
    conversion.settings |= {"data.val_crop_size": value, "data.val_resize_size": round(value * 256 / 224)}


def _weight_decay(conversion: Conversion, key: str, value: float) -> None:
    to("optimizer.weight_decay", "optimizer.bias_weight_decay")(conversion, key, value)
    if value:
        conversion.left[key] = (
            'norm layers without "bn" in their names, such as those of a ResNet\'s shortcuts, have it there, too; here all '
            "norm layers have optimizer.norm_weight_decay, 0"
        )


KEYS: dict[str, Convert] = dict.fromkeys(
    (
        *("data.gpu", "data.in_memory", "data.num_workers", "data.train_dataset", "data.val_dataset"),
        *("dist.address", "dist.port", "dist.world_size", "logging.folder", "logging.log_level"),
        *("training.distributed", "training.eval_only", "validation.batch_size", "lr.lr_peak_epoch"),
        "training.bn_wd",  # of the configurations, which train_imagenet.py does not read
        *("lr.step_ratio", "lr.step_length"),  # with `lr.lr_schedule_type`
    ),
    ignore,
) | {
    "lr.lr": to("optimizer.lr"),
    "lr.lr_schedule_type": only("cyclic", because="supported: cyclic"),
    "model.arch": to("model.name"),
    "training.batch_size": _batch,
    "training.epochs": _epochs,
    "training.label_smoothing": to("label_smoothing"),
    "training.momentum": to("optimizer.momentum"),
    "training.optimizer": only("sgd", because="supported: sgd"),
    "training.weight_decay": _weight_decay,
    "training.use_blurpool": flag("model.blurpool"),
    "resolution.min_res": ignore,
    "resolution.max_res": _size,
    "resolution.start_ramp": ignore,
    "resolution.end_ramp": ignore,
    "validation.lr_tta": flag("data.val_mirror"),
    "validation.resolution": _validation,
}
