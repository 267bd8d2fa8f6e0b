"""Words that people use in the names of folders, files and columns."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAIN = _set("train training trn")
VAL = _set("val valid validation validate dev devel eval evaluation")
TEST = _set("test testing tst holdout pred predict prediction predictions inference unlabeled unlabelled")
# Folders that hold images of any class.
CONTAINER = _set(
    "images image img imgs pictures picture pics pic photos photo fotos foto jpg jpeg jpegs png jpegimages data "
    "dataset datasets raw files file samples sample all original originals orig resized cropped crops upload uploads"
)
# Parts of a dataset without a meaning of their own; with a number.
SHARD = _set("part parts batch batches shard shards chunk chunks volume vol disk disc fold folder dir split archive")
MASK = _set(
    "mask masks trimap trimaps segmentation segmentations segmaps seg groundtruth gt annotation annotations outlines "
    "edges depth heatmaps overlays"
)
THUMBNAIL = _set("thumb thumbs thumbnail thumbnails preview previews")

# Names of columns.
LABEL = _set(
    "label labels labelname class classes classname classnames classid category categories target targets tag tags "
    "species breed attribute attributes diagnosis diagnoses dx grade finding findings disease diseases choice choices "
    "emotion emotions style variety cultivar genre klasse klassen etikett etiketten kategorie kategorien art classe "
    "clase clases etiqueta etiquetas etiquette categoria categorias categorie 类别 标签 ラベル クラス"
)
LABEL_WEAK = _set("prediction predictions annotation gt truth groundtruth type")
LABEL_FILLER = _set("id ids idx index no number num name names text string code image picture ground")
SPLIT_COLUMN = _set("split subset set partition phase usage fold is") | TRAIN | VAL | _set("test")
GROUP = _set(
    "patient subject lesion person driver video clip track session participant group sequence individual case study "
    "scene animal plant slide specimen series burst identity donor volunteer actor speaker writer"
)
PRESENCE = _set("confidence present presence value")
# Columns about an image that are not its label, whatever their values.
ABOUT = _set(
    "width height size x y w h age sex gender source url uri path date time timestamp year month day created updated "
    "lat lon latitude longitude confidence score id uid uuid index frame camera device license author photographer "
    "caption text description comment comments note notes annotator annotators rater view position bytes md5 sha sha1 "
    "sha256 hash bbox boxes box xmin xmax ymin ymax roi channels format mode title lead rotation orientation "
    "localization"
)
BOXES = _set("bbox bboxes boundingbox shapes polygon polygons points regions segmentation keypoints")
BOX = BOXES | _set("xmin xmax ymin ymax roi x1 x2 y1 y2")
NO_LABEL = frozenset(("no finding", "no findings", "none", "no label", "no labels", "nothing", "n/a", "-"))
# What cameras, phones and programs put before a number, which is no class.
CAMERA = _set(
    "img dsc dscn dscf dcim dji gopr gp pxl mvimg sam p pict pic image images photo foto picture frame frames scan "
    "screenshot screen shot whatsapp signal file sample im i train training test val valid validation vid video "
    "untitled unnamed download isic cam camera snapshot capture rgb left right front back top bottom side small large "
    "copy edited final original cropped resized"
)


def words(name: str) -> list[str]:
    """The words and numbers in ``name``, in lower case; ``TrainImages_2`` has train, images and 2."""
    found = []
    for run in _WORD.findall(name):
        parts = _CAMEL.findall(run) if run.isascii() else []
        found += [part.lower() for part in (parts if "".join(parts) == run else [run])]
    return found


def split_of(name: str) -> str | None:
    """The split that a name such as ``Final_Training``, ``valid`` or ``test1`` contains, if it is one; trainval is train."""
    found = set(words(name.replace("trainval", "train")))
    splits = [split for split, known in (("train", TRAIN), ("val", VAL), ("test", TEST)) if found & known]
    return splits[0] if len(splits) == 1 or splits[:2] == ["train", "val"] else None


def is_only_split(name: str) -> bool:
    """Whether a name says nothing but the split: ``train``, ``test1``, ``train_images``."""
    rest = {word for word in words(name.replace("trainval", "train")) if not word.isdecimal()} - CONTAINER - {"set"}
    return split_of(name) is not None and rest <= TRAIN | VAL | TEST


def without_numbers(name: str) -> tuple[str, ...]:
    """The words of a name that are not numbers."""
    return tuple(word for word in words(name) if not word.isdecimal())
