"""The papers' figures (`configs/figures.py`), and the drawing of figures and trees."""
