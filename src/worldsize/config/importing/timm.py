"""The ``args.yaml`` that timm's train.py writes into its output folder, of timm 0.6 to 1.0."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from worldsize.config.importing import timm_images
from worldsize.config.importing.base import Conversion, Convert, ignore, one_of, only, to
from worldsize.config.wording import count

# Where and how a run executes, and numbers that only matter together with another key.
_IGNORED = (
    *("config", "data", "data_dir", "dataset_download", "dataset_trust_remote_code", "train_split", "val_split"),
    *("train_num_samples", "val_num_samples", "class_map", "input_key", "target_key", "num_classes"),
    *("workers", "pin_mem", "no_prefetcher", "prefetcher", "use_multi_epochs_loader", "worker_seeding", "seed"),
    *("output", "experiment", "log_interval", "log_wandb", "wandb_project", "wandb_tags", "wandb_resume_id", "save_images"),
    *("recovery_interval", "val_interval", "checkpoint_hist", "eval_metric", "validation_batch_size", "start_epoch"),
    *("resume", "no_resume_opt", "local_rank", "device", "device_modules", "distributed", "world_size", "rank", "no_ddp_bb"),
    *("channels_last", "fuser", "fast_norm", "grad_checkpointing", "torchscript", "torchcompile", "torchcompile_mode"),
    *("synchronize_step", "amp_impl", "amp_dtype", "dist_bn", "model_ema_force_cpu"),
    *("img_size", "input_size", "crop_pct", "mean", "std", "interpolation"),  # with `model`
    "clip_mode",  # with `clip_grad`
    *("lr_base_size", "lr_base_scale", "grad_accum_steps"),  # with `lr` and `batch_size`
    *("decay_epochs", "decay_milestones", "decay_rate", "patience_epochs"),  # with `sched`
    *("lr_noise_pct", "lr_noise_std", "lr_cycle_mul", "lr_cycle_decay"),
    *("naflex_train_seq_lens", "naflex_max_seq_len", "naflex_patch_sizes", "naflex_patch_size_probs", "naflex_loss_scale"),
    *("kd_distill_type", "kd_loss_type", "kd_temperature", "kd_student_feature_dim", "kd_teacher_feature_dim"),
    *("kd_token_distill_type", "distill_loss_weight", "task_loss_weight"),
)

_MOST = 10.0  # magnitude of timm's RandAugment


def _dataset(conversion: Conversion, key: str, value: str | None) -> None:
    name = str(value or "").lower()
    if name.endswith("/cifar10"):
        conversion.settings["data.name"] = "cifar10"
    elif name not in ("", "folder", "imagefolder") and "imagenet" not in name:
        conversion.left[key] = "set data.name and data.root by hand"


def _model(conversion: Conversion, key: str, value: str) -> None:
    conversion.settings["model.name"] = value if _is_torchvisions(value) else f"timm:{value}"
    if conversion.given.get("pretrained"):
        conversion.settings["model.weights"] = f"timm:{value}"
    timm_images.prepared(conversion, value)


def _is_torchvisions(network: str) -> bool:
    """Whether torchvision has the same network."""
    return re.fullmatch(r"resnet(18|34|50|101|152)", network) is not None


def _batch(conversion: Conversion, key: str, value: int) -> None:
    """Images per GPU and forward pass: BatchNorm's statistics are over these."""
    conversion.settings |= {"micro_batch": value, "global_batch": _global_batch(conversion)}


def _global_batch(conversion: Conversion) -> int:
    given = conversion.given
    return int(given.get("batch_size", 128) * conversion.world_size * (given.get("grad_accum_steps") or 1))


def _lr(conversion: Conversion, key: str, value: float | None) -> None:
    """The peak ``lr``, or without it ``lr_base`` for batches of ``lr_base_size``, as train.py scales it."""
    given, global_batch = conversion.given, _global_batch(conversion)
    if given.get("lr"):
        peak = given["lr"]
        conversion.settings |= {"optimizer.lr": peak, "optimizer.lr_reference_batch": global_batch}
    else:
        base, size = given.get("lr_base", 0.1), given.get("lr_base_size", 256)
        scaling = given.get("lr_base_scale") or ("sqrt" if re.search("ada|lamb", given["opt"].lower()) else "linear")
        peak = base * (global_batch / size) ** (0.5 if scaling == "sqrt" else 1)
        conversion.settings |= {
            "optimizer.lr": base,
            "optimizer.lr_reference_batch": size,
            "optimizer.lr_scaling": "sqrt" if scaling == "sqrt" else "linear",
        }
    if given.get("warmup_epochs", 1):
        _fraction(conversion, "warmup_lr", peak, "schedule.warmup_start")
    _fraction(conversion, "min_lr", peak, "schedule.end")


def _fraction(conversion: Conversion, key: str, peak: float, setting: str) -> None:
    """A learning rate, which is a fraction of the peak here."""
    rate = conversion.given.get(key)
    if rate and rate > peak:
        conversion.left[key] = f"supported: at most the peak learning rate, {peak:g}"
    elif rate:
        conversion.settings[setting] = float(f"{rate / peak:.12g}")  # turns 9.999999999999999e-05 into 1e-4


def _optimizer(conversion: Conversion, key: str, value: str) -> None:
    known = {"sgd": ("sgd", True), "nesterov": ("sgd", True), "momentum": ("sgd", False)}
    name, nesterov = known.get(value, (value, None))
    if name not in ("sgd", "adamw", "nadamw", "lamb", "lion", "rmsprop"):
        conversion.left[key] = "supported: sgd, momentum, adamw, nadamw, lamb, lion, rmsprop"
        return
    conversion.settings["optimizer.name"] = name
    if nesterov is not None:
        nesterov = conversion.given.get("opt_kwargs.nesterov", nesterov)
        # Without momentum there is nothing to look ahead along: it is plain SGD.
        conversion.settings["optimizer.nesterov"] = bool(nesterov) and conversion.given.get("momentum") != 0
    if name == "rmsprop":
        conversion.settings["optimizer.alpha"] = 0.9  # timm's default; torch's is 0.99
    if name == "lion":
        conversion.settings["optimizer.betas"] = [0.9, 0.99]  # its default in timm
    if name == "lamb" and not conversion.given.get("clip_grad"):
        conversion.settings["optimizer.clip_norm"] = 1.0  # timm's LAMB clips by itself
    if name == "lamb" and conversion.given.get("weight_decay") == 0:
        conversion.left[key] = "without weight decay, timm's LAMB does not scale the updates of a layer; here it does"


def _nesterov(conversion: Conversion, key: str, value: bool) -> None:
    """Converted with `opt`, whose default it replaces."""
    if conversion.given["opt"] not in ("sgd", "nesterov", "momentum"):
        conversion.left[key] = "supported with sgd, nesterov and momentum"


def _layer_decay(conversion: Conversion, key: str, value: float | None) -> None:
    to("optimizer.layer_decay")(conversion, key, value)
    network = str(conversion.given.get("model"))
    if value not in (None, 1) and not _lists_blocks(network):
        conversion.left[key] = f"timm has one rate for each 12 parameters of {network}; here each block has its own"


def _lists_blocks(network: str) -> bool:
    """Whether timm's network tells what its blocks are, as most do; True if timm is not installed or does not have it."""
    if find_spec("timm") is None:
        return True
    import timm
    import torch

    if not timm.is_model(network):
        return True
    with torch.device("meta"):
        return hasattr(timm.create_model(network), "group_matcher")


def _clip(conversion: Conversion, key: str, value: float | None) -> None:
    mode, lamb = conversion.given.get("clip_mode") or "norm", conversion.given.get("opt") == "lamb"
    if value is None:
        return
    if mode == "norm":
        # timm's LAMB clips to 1 by itself, after the training loop.
        conversion.settings["optimizer.clip_norm"] = min(value, 1.0) if lamb else value
    elif lamb or mode not in ("value", "agc"):
        conversion.left["clip_mode"] = "timm's LAMB also clips the norm to 1" if lamb else "supported: norm, value, agc"
    else:
        conversion.settings[f"optimizer.clip_{mode}"] = value


def _dropout(conversion: Conversion, key: str, value: float) -> None:
    """timm's networks get it even if it is 0, which is not the default of some."""
    conversion.settings["model.dropout"] = (value or None) if _is_torchvisions(str(conversion.given.get("model"))) else value


def _smoothing(conversion: Conversion, key: str, value: float) -> None:
    """timm smooths the targets before it compares them with --bce-target-thresh, after which nothing of that is left."""
    erased = conversion.given.get("bce_loss") and conversion.given.get("bce_target_thresh")
    conversion.settings["label_smoothing"] = 0.0 if erased else value


def _schedule(conversion: Conversion, key: str, value: str) -> None:
    names = {"cosine": "cosine", "step": "step", "multistep": "step", "poly": "polynomial", "constant": "constant"}
    if value not in names:
        conversion.left[key] = f"supported: {', '.join(names)}"
        return
    given = conversion.given
    rate = given.get("decay_rate", 0.1)
    conversion.settings["schedule.name"] = names[value]
    if value in ("cosine", "poly") and given.get("warmup_epochs", 5) and not given.get("warmup_prefix"):
        conversion.settings["schedule.warmup_prefix"] = False
    if value == "poly":
        conversion.settings["schedule.power"] = rate
    if value == "multistep":
        # By epoch, timm's rate falls one epoch before the milestone.
        epochs, early = given.get("epochs", 300), 0 if given.get("sched_on_updates") else 1
        milestones = [epoch - early for epoch in given.get("decay_milestones", [90, 180, 270]) if epoch - early < epochs]
        conversion.settings |= {"schedule.milestones": milestones, "schedule.gamma": rate}
    if value == "step":
        every, epochs = given.get("decay_epochs", 90), given.get("epochs", 300)
        milestones = [every * i for i in range(1, int(epochs / every) + 1) if every * i < epochs]
        conversion.settings |= {"schedule.milestones": milestones, "schedule.gamma": rate}


def _warmup_prefix(conversion: Conversion, key: str, value: bool) -> None:
    """The schedule begins after the warmup, as here, and the warmup is not part of ``epochs``."""
    if value and conversion.given.get("sched", "cosine") in ("step", "multistep"):
        conversion.left[key] = "add schedule.warmup_epochs to epochs and schedule.milestones"
    elif value:
        conversion.settings["epochs"] = conversion.given.get("epochs", 300) + conversion.given.get("warmup_epochs", 5)


def _epochs(conversion: Conversion, key: str, value: int) -> None:
    conversion.settings.setdefault("epochs", value)  # unless `warmup_prefix` has set it


def _precision(conversion: Conversion, key: str, value: bool) -> None:
    given = conversion.given
    if any(given.get(name) for name in ("amp", "native_amp", "apex_amp")):
        conversion.settings["precision"] = "bf16" if given.get("amp_dtype") == "bfloat16" else "fp16"
    else:
        conversion.settings["precision"] = "fp32"


def _erasing(conversion: Conversion, key: str, value: float) -> None:
    if value:
        conversion.settings |= {
            "augment.erasing": value,
            "augment.erasing_area": [0.02, 1 / 3],
            "augment.erasing_ratio": [0.3, 1 / 0.3],
        }


def _head_scale(conversion: Conversion, key: str, value: float | None) -> None:
    if value == 0:
        conversion.settings["model.zero_head"] = True
    elif value not in (None, 1):
        conversion.left[key] = "supported: 0"


def _policy(conversion: Conversion, key: str, value: str | None) -> None:
    if not value:
        return
    if value == "3a":
        conversion.settings["augment.policy"] = "3-augment"
        return
    if str(value).startswith("augmix"):
        conversion.left[key] = "--augment.policy augmix has the operations of torchvision"
        return
    settings: dict[str, Any] = {"policy": "randaugment-timm", "fill": "mean", "magnitude": 10.0, "magnitude_std": 0.0}
    kind, *parts = str(value).split("-")
    for part in parts:
        match = re.fullmatch(r"([a-z]+)([\d.]+)", part)
        name, number = (match[1], float(match[2])) if match else (part, 0.0)
        match name:
            case "m":
                settings["magnitude"] = number
            case "n":
                settings["operations"] = int(number)
            case "mstd" if number <= 100:  # above, timm draws the magnitude uniformly
                settings["magnitude_std"] = number
            case "inc":
                settings["increasing"] = bool(number)
            case _:
                conversion.left[key] = f"{part}: supported are m, n, mstd up to 100 and inc1"
                return
    if kind != "rand" or not settings.pop("increasing", False):
        conversion.left[key] = "supported: 3a, and rand-m9-mstd0.5-inc1 with other numbers"
        return
    if settings["magnitude"] > _MOST:
        if settings["magnitude"] - _MOST < 4 * settings["magnitude_std"]:
            conversion.left[key] = f"supported: magnitudes up to {_MOST}"
            return
        settings |= {"magnitude": _MOST, "magnitude_std": 0.0}  # timm clips what it draws
    interpolation = conversion.given.get("train_interpolation")
    settings["interpolation"] = interpolation if interpolation in ("bilinear", "bicubic") else "bilinear"
    conversion.settings |= {f"augment.{name}": setting for name, setting in settings.items()}


def _jitter(conversion: Conversion, key: str, value: Any) -> None:
    if value and conversion.given.get("aa") in (None, "", "3a"):  # timm leaves it out next to other policies
        conversion.settings["augment.color_jitter"] = [value, value, value, 0.0]


def _bce(conversion: Conversion, key: str, value: bool) -> None:
    if value:
        conversion.settings["loss.name"] = "bce"


def _ema(name: str) -> Convert:
    def apply(conversion: Conversion, key: str, value: Any) -> None:
        if conversion.given.get("model_ema"):
            conversion.settings[name] = value

    return apply


def _erase_mode(conversion: Conversion, key: str, value: str) -> None:
    if conversion.given.get("reprob") and value != "const":
        conversion.left[key] = "supported: const (boxes are filled with the mean color)"


def _repeats(conversion: Conversion, key: str, value: float) -> None:
    """Copies of each image, on as many GPUs: timm repeats images only if there are several."""
    repeats, most = int(value), _global_batch(conversion) // int(conversion.given.get("batch_size", 128))
    if repeats > max(most, 1):
        conversion.left[key] = (
            f"each copy of an image needs its own micro-batch, and a step has {most} on "
            f"{count(conversion.world_size, 'GPU')}: if there were more, pass --world-size N"
        )
    elif repeats:
        conversion.settings["augment.repeats"] = repeats


def _bce_sum(conversion: Conversion, key: str, value: bool) -> None:
    if value and conversion.given.get("bce_loss"):
        conversion.settings["loss.bce_reduction"] = "sum"


KEYS: dict[str, Convert] = dict.fromkeys(_IGNORED, ignore) | {
    **dict.fromkeys(timm_images.SIZES, timm_images.changing),
    "model": _model,
    "in_chans": only(None, 3, because="images have three channels"),
    "input_img_mode": only(None, "", "RGB", because="images are RGB"),
    "pretrained": ignore,  # with `model`
    "head_init_scale": _head_scale,
    "head_init_bias": to("model.head_bias"),
    "model_dtype": only(None, "", "float32", because="weights are float32: see precision"),
    "drop_path": to("model.drop_path"),
    "model_kwargs.drop_path_rate": to("model.drop_path"),
    "drop": _dropout,
    "epochs": _epochs,
    "batch_size": _batch,
    "lr": _lr,
    "lr_base": _lr,
    "opt": _optimizer,
    "opt_kwargs.nesterov": _nesterov,
    "opt_eps": to("optimizer.eps"),
    "opt_betas": to("optimizer.betas"),
    "momentum": to("optimizer.momentum"),
    "weight_decay": to("optimizer.weight_decay"),
    "layer_decay": _layer_decay,
    "clip_grad": _clip,
    "sched": _schedule,
    "sched_on_updates": only(True, False, because="supported: true, false"),  # here always by step
    "lr_cycle_limit": only(0, 1, because="the schedule has one cycle: see schedule.name restarts"),
    "lr_k_decay": only(1.0, because="supported: 1"),
    "warmup_epochs": to("schedule.warmup_epochs"),
    "warmup_lr": ignore,  # with `lr`
    "warmup_prefix": _warmup_prefix,
    "min_lr": ignore,  # with `lr`
    "cooldown_epochs": only(0, because="there are no epochs after the schedule"),
    "train_crop_mode": only(None, "", "rrc", because="supported: rrc"),
    "scale": to("data.crop_area"),
    "ratio": to("data.crop_ratio"),
    "hflip": one_of("data.flip", {0.5: True, 0.0: False}),
    "vflip": to("augment.vflip"),
    "dataset": _dataset,
    "aa": _policy,
    "color_jitter": _jitter,
    "aug_repeats": _repeats,
    "reprob": _erasing,
    "remode": _erase_mode,
    "train_interpolation": timm_images.interpolation,
    "recount": only(1, because="there is one box per image"),
    "mixup": to("augment.mixup"),
    "cutmix": to("augment.cutmix"),
    "mixup_prob": to("augment.mix_chance"),
    "mixup_switch_prob": to("augment.cutmix_share"),
    "mixup_mode": only("batch", because="all images of a micro-batch are mixed in the same way"),
    "smoothing": _smoothing,
    "bce_loss": _bce,
    "bce_sum": _bce_sum,
    "bce_target_thresh": to("loss.bce_threshold"),
    "amp": _precision,
    "native_amp": _precision,
    "apex_amp": _precision,
    "model_ema": one_of("average.name", {True: "ema", False: None}),
    "model_ema_decay": _ema("average.decay"),
    "model_ema_warmup": _ema("average.warmup"),
    "kd_model_name": only(None, "", because="train the teacher as a run, and set loss.teacher by hand"),
    "sync_bn": one_of("parallel.sync_batchnorm", {True: True, False: None}),
}
