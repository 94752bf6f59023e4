// Search of a site that is opened from a folder: there, browsers refuse web workers. This stands in for one. It runs
// the worker's script in a hidden frame and passes messages to and fro. On a server it does nothing.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load))
      function load(src) {
        return new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src, async: false, onload: resolve, onerror: reject })
          inside.document.body.append(script)
        })
      }
      this.ready = load(address)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
