"""The demo: contributors of handwritten digits, credited and then checked by retraining without them."""
