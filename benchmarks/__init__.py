"""Speed against peers, as ratios measured alternately in one run."""
