"""Models that other programs store on this disk: found by the names people know, used where they are."""
