"""One declarative file for each supported Hugging Face `model_type`; see `family`."""
