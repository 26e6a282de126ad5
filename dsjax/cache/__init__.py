"""The paged cache: what a page holds (kinds), and which pages are free (pages)."""
