"""Programs that run the training job with several settings and draw what comes out."""
