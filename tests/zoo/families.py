"""The families that differ in kind, for tests that cannot afford all architectures."""
REPRESENTATIVE: dict[str, str] = {}
