"""The rooms of the package stay small: few files each, and short chains of imports among them."""

from __future__ import annotations

from rooms import MOST_FILES, MOST_IN_A_ROW, rooms


def test_a_room_has_few_files_and_short_chains_of_imports() -> None:
    for room in rooms():
        assert len(room.chain) <= MOST_IN_A_ROW, " > ".join(room.chain)
        assert room.files <= MOST_FILES, room.name
