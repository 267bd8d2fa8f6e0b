"""Which image a path in a table means, when folders have images with the same names."""

from __future__ import annotations

import pytest

from layout_trees import labels, refusal, unequal, written
from worldsize.data import layouts
from worldsize.data.layouts import Hints


def rows(*paths: str) -> str:
    return "file,label\n" + "".join(f"{path},{'ab'[i % 2]}\n" for i, path in enumerate(paths))


@pytest.mark.parametrize("before", ["", "/data/set/", "C:\\scans\\", "https://x.y/"])
def test_a_missing_image_is_not_replaced_by_one_in_another_folder(tmp_path, before):
    root = unequal(tmp_path, *(f"site{site}/00{i}.png" for site in (1, 2) for i in (1, 2, 3) if (site, i) != (1, 1)))
    table = rows("site1/001.png", "site1/002.png", "site1/003.png", "site2/002.png", "site2/003.png")
    found = layouts.read(written(root, labels_csv=table.replace("site", f"{before}site")))
    assert found.missing == [f"{before}site1/001.png"]
    assert sorted(labels(found)) == ["site1/002.png", "site1/003.png", "site2/002.png", "site2/003.png"]
    assert found.unlabelled == ["site2/001.png"]


@pytest.mark.parametrize("before", ["", "/data/"])
@pytest.mark.parametrize("inside", ["", "scans/"])
def test_images_of_a_missing_folder_are_not_replaced_by_others(tmp_path, inside, before):
    root = unequal(tmp_path, *(f"site2/{inside}00{i}.png" for i in (1, 2, 3)))
    named = [f"{before}site{site}/{inside}00{i}.png" for site, i in ((1, 1), (1, 3), (2, 2), (2, 3))]
    found = layouts.read(written(root, labels_csv=rows(*named)))
    assert found.missing == named[:2]
    assert labels(found) == {f"site2/{inside}002.png": "a", f"site2/{inside}003.png": "b"}


@pytest.mark.parametrize(
    "form", ["/home/ann/{}.png", "https://x.y/files/{}.png", "images/{}.png", "D:\\photos\\all\\{}.png", "/old/scans/{}.png"]
)
def test_folders_of_another_machine_do_not_count(tmp_path, form):
    root = unequal(tmp_path, *(f"scans/cut/{i}.png" for i in range(4)))
    found = layouts.read(written(root, labels_csv=rows(*(form.format(i) for i in range(4)))))
    assert (found.missing, len(found.rows)) == ([], 4)


def test_uploaded_files_are_found_whatever_the_folder_of_the_server(tmp_path):
    root = unequal(tmp_path, *(f"{i % 2}/x{i}.png" for i in range(4)))
    found = layouts.read(written(root, labels_csv=rows(*(f"/data/upload/1/{i:08x}-x{i}.png" for i in range(4)))))
    assert (found.missing, len(found.rows)) == ([], 4)


# Names of several images --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("train_images", "test_images"), ("all/Training", "all/Test")]
)
def test_of_equal_names_the_image_to_predict_is_not_meant(tmp_path, train, test):
    root = unequal(tmp_path, *(f"{train}/{i}.png" for i in range(6)), *(f"{test}/{i}.png" for i in range(3)))
    found = layouts.read(written(root, labels_csv=rows(*map(str, range(6)))))
    assert (found.missing, labels(found)) == ([], {f"{train}/{i}.png": "ab"[i % 2] for i in range(6)})


def test_names_of_several_images_are_unclear(tmp_path):
    root = unequal(tmp_path, *(f"x{i}.png" for i in range(6)), "x1.jpg", "x2.jpg")
    written(root, labels_csv=rows(*(f"x{i}" for i in range(6))))
    assert "2 names may mean several images: 'x1' is x1.jpg or x1.png" in refusal(root)
    assert len(layouts.read(root, Hints(ignore=("x1.jpg", "x2.jpg"))).rows) == 6


@pytest.mark.parametrize("folders", [("a", "b"), ("train", "val"), ("train/cat", "test")])
def test_folders_that_a_table_does_not_name_are_unclear(tmp_path, folders):
    root = unequal(tmp_path, *(f"{folders[0]}/{i}.png" for i in range(6)), *(f"{folders[1]}/{i}.png" for i in range(2)))
    written(root, t_csv=rows(*map(str, range(6))))
    either = " or ".join(sorted(f"{folder}/0.png" for folder in folders))
    assert f"2 names may mean several images: '0' is {either}" in refusal(root, labels="t.csv")


def test_names_of_several_images_do_not_matter_where_other_tables_have_their_labels(tmp_path):
    paths = [f"{folder}/{i}.png" for folder in ("part1", "part2") for i in range(3)]
    written(unequal(tmp_path, *paths, "part3/7.png"), all_csv=rows(*paths), short_csv="id,class\n7,a\n1,a\n2,b\n")
    assert set(labels(layouts.read(tmp_path))) == {*paths, "part3/7.png"}
