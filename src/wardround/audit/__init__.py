"""What could leak: attacks on whatever leaves a site, run by the site on its own images before anything is sent."""
