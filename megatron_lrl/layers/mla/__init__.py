"""Multi-head latent attention as a layer kind; see README.md."""
