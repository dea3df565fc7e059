"""Tests who of several living groups with one name has it."""

from __future__ import annotations

from torchft_svc.core.quorum.names import Names, stable_name


def named(*replica_ids: str) -> Names:
    names = Names()
    for replica_id in replica_ids:
        names.add(replica_id)
    return names


def test_the_part_before_the_last_colon_is_the_name() -> None:
    assert [stable_name(each) for each in ("a:1", "a:b:1", "a", ":1")] == ["a", "a:b", "a", ":1"]


def test_who_came_first_has_the_name() -> None:
    names = named("a:1", "b:1", "a:2", "a:3")
    assert [names.is_free_for(each) for each in ("a:1", "a:2", "b:1", "a:9", "c:1")] == [
        *(True, False, True),
        *(False, True),  # strangers
    ]
    assert (names.earlier("a:3"), names.earlier("a:1")) == (["a:1", "a:2"], [])
    assert names.earlier("a:9") == ["a:1", "a:2", "a:3"]
    assert (names.later("a:1"), names.later("a:3")) == (["a:2", "a:3"], [])
    assert names.later("a:9") == [], "it does not live, so it refuses nobody"
    assert (names.owners("a"), names.owners("c")) == (["a:1", "a:2", "a:3"], [])


def test_an_heir_is_informed_once() -> None:
    names = named("a:1", "a:2", "a:3", "b:1")
    assert names.pop_newly_unique() == []
    names.remove("a:1")
    assert names.is_free_for("a:2")
    assert (names.pop_newly_unique(), names.pop_newly_unique()) == (["a:2"], [])
    names.remove("b:1")
    names.remove("a:2")
    names.remove("a:3")
    assert names.pop_newly_unique() == [], "nobody is left"
