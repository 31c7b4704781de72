"""Two hundred profiles, right and wrong in known ways: no wrong refusal, none missed, and in no time."""

import json
import re
import resource
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from generated_profiles import Profile, profiles

Kernelswap = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821
COUNT = 200


def write(folder: Path, made: list[Profile]) -> None:
    for name in ("models", "profiles"):
        (folder / name).mkdir()
    (folder / "models" / "m.yaml").write_text("path: /srv/m\n")
    for profile in made:
        (folder / "profiles" / f"{profile.name}.yaml").write_text(profile.text)


def by_profile(items: list[dict[str, str]]) -> dict[str, set[str]]:
    """The keys that are named, of each profile."""
    found = defaultdict(set)
    for item in items:
        match = re.match(r"profiles/(\w+)\.yaml:[0-9]+: (?:flags|environment)/([^/]+)", item["where"])
        assert match, item
        found[match[1]].add(match[2])
    return found


@pytest.fixture(scope="module")
def made() -> list[Profile]:
    return list(profiles(COUNT))


def test_no_wrong_refusal_and_none_missed(tmp_path: Path, kernelswap: Kernelswap, made: list[Profile]) -> None:
    write(tmp_path, made)
    done = kernelswap("check", "--library", ".", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert by_profile(said["faults"]) == {each.name: {each.blamed} for each in made if each.blamed}
    warned = by_profile(said["warnings"])
    assert {each.name for each in made if each.warned} <= set(warned)
    assert not {each.name for each in made if not each.warned and not each.blamed and each.parsed} & set(warned)
    assert sum(bool(each.blamed) for each in made) in range(COUNT // 3, 2 * COUNT // 3)


def test_a_hundred_profiles_cost_a_second_at_most(tmp_path: Path, kernelswap: Kernelswap, made: list[Profile]) -> None:
    write(tmp_path, made[:100])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    kernelswap("check", "--library", ".", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 2  # half of that on an idle core; another's work on a shared one is not ours
