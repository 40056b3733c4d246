"""Writes how scores compare with ground truth as one page that explains itself: `write_report`."""
