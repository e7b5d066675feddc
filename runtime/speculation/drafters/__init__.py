"""Guessing the next tokens: predictors, drafters, and the trees they make. Token ids only, never text."""
