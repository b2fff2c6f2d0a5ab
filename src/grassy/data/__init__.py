"""Labelled images: sources, transforms, and batches on the device."""
