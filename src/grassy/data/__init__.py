"""Labelled images, from wherever they lie to batches on the device."""
