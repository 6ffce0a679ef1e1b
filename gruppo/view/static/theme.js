// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's one holds.
{
  let chosen = null;
  try { chosen = localStorage.getItem("gruppo-theme"); } catch { /* a file that is opened from disk may have no storage */ }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
