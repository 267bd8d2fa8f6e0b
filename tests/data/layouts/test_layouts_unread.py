"""Images of formats that are not decoded, and classes whose names look alike: `init` says why it does not use them."""

from __future__ import annotations

import unicodedata

import pytest

from layout_trees import numbered, refusal, unequal
from worldsize.data import layouts

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
REMEDY = "of unsupported formats (heic); to use them, convert them to JPEG, PNG or WebP"


def photos(root, folder):
    """Three photos of a phone in ``folder``."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    names = [f"{folder}/IMG_{number}.HEIC" for number in range(3)]
    for name in names:
        (root / name).write_bytes(b"\0\0\0\x18ftypheic")
    return names


def test_photos_of_a_phone_are_named_as_not_used(tmp_path):
    root = unequal(tmp_path, *numbered("cat", "dog"))
    photos(root, "owl")
    found = layouts.read(root)
    assert found.classes == ["cat", "dog"]
    assert f"not used: 3 {REMEDY}" in found.unused.note(root)


def test_photos_that_a_table_names_are_there(tmp_path):
    root = unequal(tmp_path, *numbered("cat", "dog"))
    names = [f"{one}/{image.name}" for one in ("cat", "dog") for image in sorted((root / one).iterdir())]
    rows = [f"{name},{name[:3]}" for name in [*names, *photos(root, "owl"), "owl/gone.HEIC"]]
    (root / "labels.csv").write_text("\n".join(["file,label", *rows]))
    found = layouts.read(root)
    assert found.missing == ["owl/gone.HEIC"]
    assert f"not used: 3 {REMEDY}" in found.unused.note(root)


@pytest.mark.parametrize("folder", ["", "owl"])
def test_only_photos_of_a_phone_are_refused_with_the_reason(tmp_path, folder):
    photos(tmp_path, folder or ".")
    assert "no images that are used" in (said := refusal(tmp_path)) and REMEDY in said


def test_one_readable_class_is_refused_with_the_reason(tmp_path):
    root = unequal(tmp_path, *numbered("cat"))
    photos(root, "owl")
    assert REMEDY in refusal(root)


def test_classes_in_two_unicode_forms_are_shown(tmp_path):
    root = unequal(tmp_path, *numbered(f"train/{NFC}", "train/tea", f"val/{NFD}", "val/tea"))
    assert r"'caf\xe9' and 'cafe\u0301' look alike, but their Unicode forms differ" in refusal(root)


def test_labels_in_two_unicode_forms_are_shown(tmp_path):
    root = unequal(tmp_path, *(f"{i}.png" for i in range(8)))
    rows = [f"{i}.png,{('tea', NFC, 'tea', NFD)[i // 2 % 2 + i // 4 * 2]},{'val' if i > 3 else 'train'}" for i in range(8)]
    (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    assert r"'cafe\u0301' and 'caf\xe9' look alike" in refusal(root)
