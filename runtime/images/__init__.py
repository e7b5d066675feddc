"""Images in prompts: decoding, preprocessing, vision towers, and their places among the tokens of a prompt."""
