"""Plan, then fill: checkpoint headers decide every output byte before one weight is read."""
