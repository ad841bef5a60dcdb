// Material puts the copy button of each block of code into a landmark without a name. A list of landmarks then has as
// many "navigation" as the page has blocks; without the role, the buttons stay, and so do their names.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none")
}).observe(document.querySelector("main"), { childList: true, subtree: true })
