"""Runs the demo: credits contributors of handwritten digits, and checks the predictions by retraining."""
