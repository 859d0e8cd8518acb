"""Which tree to draft, and what to expect of it, from the acceptance that was measured."""
