"""URLs of storage that a recipe names."""

from __future__ import annotations

import json

import pytest

from worldsize.data import remote
from worldsize.data.shards.store import Remote
from worldsize.errors import UserError


@pytest.mark.parametrize("beginning", ["reference://::", "reference::", "simplecache::reference://::"])
def test_files_of_references_are_refused_because_they_can_run_programs(tmp_path, beginning):
    """The recipe of a run from others names the data; older versions of fsspec run what is between the braces."""
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(tmp_path / "ran") + "') }}"
    content = {"version": 1, "templates": {}, "gen": [{"key": template, "url": "x", "dimensions": {"i": [1]}}], "refs": {}}
    (tmp_path / "refs.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"reference:// is not supported, because its files can run programs"):
        Remote(f"{beginning}{tmp_path}/refs.json")
    assert not (tmp_path / "ran").exists()


def test_other_urls_are_opened(tmp_path):
    files, folder = remote.file_system(f"file://{tmp_path}/reference")
    assert folder == f"{tmp_path}/reference" and files.protocol == ("file", "local")
