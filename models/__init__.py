"""Models on disk: bundles, finding and downloading them, the bundled model."""
