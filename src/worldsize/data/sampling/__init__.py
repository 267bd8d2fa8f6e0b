"""Which sample comes when: pure functions of the seed and the position. Read `order` first."""
