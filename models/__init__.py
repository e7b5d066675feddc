"""What lies on disk: the bundle format, finding models, the bundled model and how it is trained."""
