"""One declarative file per Hugging Face `model_type`; see `family`."""
