"""What is done with trained weights: load, save, evaluate, predict, export, extract features."""
