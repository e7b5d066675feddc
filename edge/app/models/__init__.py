"""Models in the app: the catalog, downloads, exports, checks and comparisons."""
