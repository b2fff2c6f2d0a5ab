"""`grassy demo`: linear and Grassmann heads on handwritten digits."""
