"""The best trees for a measured acceptance, and the tokens per call to expect of them."""
