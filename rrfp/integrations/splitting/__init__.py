"""`rrfp.split`: whole models into the modules of pipeline stages."""
