def test_a(world):
    print(sorted(p.relative_to(world.store) for p in world.store.rglob("*")))
